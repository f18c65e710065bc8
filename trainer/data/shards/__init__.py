"""Streaming shards: fetched and deleted while training runs."""
