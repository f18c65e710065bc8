"""Make shards from a source: map its parts one by one, then assemble the shards."""
