"""Flotilla measured: beside other programs, and against published results."""
