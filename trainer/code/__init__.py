"""Bundles of the user's modules: collected when a run is submitted, importable in its steps."""
