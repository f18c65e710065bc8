"""Runs on this machine and on a KFP instance; returns values and prints nothing."""
