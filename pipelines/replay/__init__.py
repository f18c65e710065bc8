"""Replays a step of a run on this machine with the recorded arguments, and compares results."""
