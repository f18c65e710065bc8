"""Optimizers, and what surrounds an update: averages, loss scale, fused updates."""
