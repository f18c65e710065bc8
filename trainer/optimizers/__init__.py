"""How an update moves variables: kernels, rows of tables, averages, the scale of the loss."""
