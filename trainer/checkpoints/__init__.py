"""Checkpoints: saving, retention, background publication, restoring, selection, warm starts."""
