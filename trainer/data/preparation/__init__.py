"""From a source to shards: map its parts one by one, then assemble them."""
