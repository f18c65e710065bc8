"""Checks a configuration with its source and the user's code before anything is paid."""
