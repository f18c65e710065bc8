"""Datasets that need no download, because they are generated or shipped with scikit-learn."""
