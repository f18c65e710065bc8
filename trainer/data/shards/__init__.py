"""Shards that come and go while training runs."""
