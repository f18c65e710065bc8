"""Sequences of variable length, and users' functions that convert examples (`data.map`)."""
