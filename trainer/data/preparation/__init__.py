"""Makes shards from a source: maps its parts one by one, then assembles them."""
