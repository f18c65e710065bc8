"""Generates pages of the documentation."""
