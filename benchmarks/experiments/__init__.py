"""Repeats the published experiments: `make experiments` writes `docs/experiments.md`."""
