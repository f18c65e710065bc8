"""Retention: what below a storage root is too old to be kept, and what refers to it."""
