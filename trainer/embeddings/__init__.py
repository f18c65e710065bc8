"""Embedding tables: their rows, their shards on servers, and their updates."""
