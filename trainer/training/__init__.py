"""The tasks of a training cluster: entry, chief, outer loop, servers, evaluator."""
