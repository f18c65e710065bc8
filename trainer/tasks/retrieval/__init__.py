"""Recommenders: a score of each pair, and vectors by which the best items are found."""
