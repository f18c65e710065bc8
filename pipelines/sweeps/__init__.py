"""Sweeps on this machine, and as one pipeline on a KFP instance."""
