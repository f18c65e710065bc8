"""Bundles of the user's own modules: made where a run is started, put on the path of its steps."""
