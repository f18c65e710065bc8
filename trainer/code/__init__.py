"""Bundles of the user's modules: collected when a run is started, importable in its steps."""
