"""Measures the cost of a step by model and cluster size, and predicts larger clusters."""
