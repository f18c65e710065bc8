"""Processes forked from a server that has loaded TensorFlow."""
