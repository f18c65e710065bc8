"""Datasets of TFDS: their builders, found by name, downloaded, and read as a source."""
