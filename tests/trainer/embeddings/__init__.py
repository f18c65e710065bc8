"""Tests of `trainer/embeddings`."""
