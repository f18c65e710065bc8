"""Softmax regression: one linear layer from the flattened input to the logits."""

from __future__ import annotations

import keras

from trainer.models.spec import InputSpec, scaled_input


def softmax(spec: InputSpec) -> keras.Model:
    """Return the model; its softmax stands in the loss, so the outputs are logits."""
    given, x = scaled_input(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    logits = keras.layers.Dense(spec.num_classes, dtype="float32", name="logits")(x)
    return keras.Model(given, logits, name="softmax")
