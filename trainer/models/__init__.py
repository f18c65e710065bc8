"""Keras models: `registry.build` makes one by name; one file a model.

A model that is built in has a row in `MODELS` of `trainer/config/model.py`.
"""
