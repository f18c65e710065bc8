"""Metrics of an evaluation in double precision, with their intervals."""
