"""The JobSet engine."""
