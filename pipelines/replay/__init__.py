"""Replays a step of a run on this machine with its recorded arguments, and compares results."""
