"""The gate on data: rules that a dataset has to keep before a model is trained on it."""
