"""The documentation."""
