"""What a step costs by the size of the model and of the cluster, and what follows from it."""
