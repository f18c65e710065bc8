"""Recommendation: a score for each pair of a user and an item, and vectors to retrieve items."""
