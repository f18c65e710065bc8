"""Keras models. `registry.build` creates a model by name.

Each built-in model has a row in `MODELS` of `trainer/config/model.py`.
"""
