"""Measuring a checkpoint on the test split, next to the champion."""
