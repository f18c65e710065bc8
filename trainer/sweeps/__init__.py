"""Sweeps: what is tried, which trial goes on, which one is the best, and the page."""
