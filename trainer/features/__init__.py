"""The schema of examples: features, names, classes and statistics of a dataset."""
