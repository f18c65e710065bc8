"""The configuration of a run: its keys and limits, how it is loaded, and the run parameters."""
