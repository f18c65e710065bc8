"""Evaluation of a checkpoint on the test split, compared with the champion."""
