"""Sweeps: the search space, their state on this machine, and the ranking of trials."""
