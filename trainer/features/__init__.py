"""What an example holds: the schema of a dataset, names, classes and statistics."""
