"""Tests of `trainer/features`."""
