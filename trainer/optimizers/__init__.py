"""Optimizers, moving averages of weights, loss scaling, and fused updates."""
