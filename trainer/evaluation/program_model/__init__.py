"""Loads the model that a user's program has written, and returns it as a Keras model."""
