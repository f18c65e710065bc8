"""The configuration of a run: its keys and limits, loading, and the run parameters."""
