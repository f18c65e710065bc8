"""What TensorBoard displays of a run: scalars, the configuration as hyperparameters, a profile."""
