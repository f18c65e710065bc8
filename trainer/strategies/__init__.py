"""How a training step runs on the cluster: one interface, one file a strategy."""
