"""The model of a user's own program, as a model of ours: see `load.py`."""
