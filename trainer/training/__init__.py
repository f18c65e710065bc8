"""The tasks of a training cluster: entry point, chief, outer loop, servers and evaluator."""
