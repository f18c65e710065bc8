"""The datasets that are always there: generated, or shipped with scikit-learn."""
