"""Benchmarks that compare Flotilla with other programs and with published results."""
