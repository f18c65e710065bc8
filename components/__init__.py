"""Thin KFP components: the body of each is one import and one call."""
