"""The published experiments, run again: `make experiments` writes docs/experiments.md."""
