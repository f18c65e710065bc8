"""Loads the model that a user's program has written as a Keras model."""
