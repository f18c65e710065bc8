"""Runs on this machine and on a KFP instance; functions return values and never print."""
