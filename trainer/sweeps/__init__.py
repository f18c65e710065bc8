"""Sweeps: the search space, the local state of a sweep, and the ranking of its trials."""
