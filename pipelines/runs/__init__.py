"""Runs on this machine and on a KFP instance: values are returned, nothing is printed."""
