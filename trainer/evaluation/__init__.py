"""Evaluation of a checkpoint on the test split, and its comparison with the champion."""
