"""Measures the cost of a step by size of model and cluster, and predicts larger clusters."""
