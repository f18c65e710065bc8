"""Retention: finds data below a storage root that are too old to keep and not referenced."""
