"""Tables of embeddings: rows, their shards on servers, their updates."""
