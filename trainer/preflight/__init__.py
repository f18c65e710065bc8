"""Checks a configuration, its data source and the user's code before a run."""
