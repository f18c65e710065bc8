"""Recommenders: a score for each pair, and vectors to retrieve the best items."""
