"""The engine for JobSet."""
