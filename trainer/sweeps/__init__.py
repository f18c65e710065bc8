"""Sweeps: what is tried, its state on this machine, and which trial is the best."""
