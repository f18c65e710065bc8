"""Datasets: `prepare` downloads, splits and shards them. `read` makes batches from the shards."""
