"""Streaming shards: they are fetched and deleted while training runs."""
