"""Tests of `trainer/events`."""
