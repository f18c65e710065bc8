"""Tests of `trainer/runtime`."""
