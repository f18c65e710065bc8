"""Sweeps on this machine, and as a single pipeline on a KFP instance."""
