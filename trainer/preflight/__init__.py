"""Checks of a configuration, its source and the user's code before a run is paid for."""
