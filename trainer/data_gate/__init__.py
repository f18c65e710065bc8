"""The data gate: rules for a dataset, compared with the champion's, and their report."""
