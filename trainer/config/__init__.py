"""The configuration of a run: keys and limits, reading, run parameters."""
