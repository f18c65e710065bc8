"""Flotilla's trainer: pure TensorFlow, free of Kubeflow Pipelines and of Kubernetes."""

import os

# Keras reads this when it is imported, after it has read ~/.keras/keras.json: a person who works
# with another backend elsewhere has it set there, or in the shell.
os.environ["KERAS_BACKEND"] = "tensorflow"
