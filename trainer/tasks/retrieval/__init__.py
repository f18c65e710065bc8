"""Recommendation: scores for pairs of a user and an item, and vectors to retrieve items."""
