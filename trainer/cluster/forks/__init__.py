"""Processes that are forked from one that has TensorFlow loaded already."""
