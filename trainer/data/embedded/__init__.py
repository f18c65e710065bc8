"""Datasets that need no download: generated, or shipped with scikit-learn."""
