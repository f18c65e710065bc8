"""Retention: finds old, unreferenced data below a storage root and removes them."""
