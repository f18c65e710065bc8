"""Checkpoints: how to save, keep, publish, restore and select them, and warm starts."""
