"""Schema of examples: the features, names, classes and statistics of a dataset."""
