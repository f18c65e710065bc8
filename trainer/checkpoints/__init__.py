"""Checkpoints: saving, finding, retention, publication in the background, warm starts."""
