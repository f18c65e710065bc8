"""Keras models: `registry.build` makes one by name; one file a model."""
