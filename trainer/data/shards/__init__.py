"""Streaming shards, which are fetched and deleted while training runs."""
