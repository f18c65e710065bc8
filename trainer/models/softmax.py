"""Softmax regression: one linear layer from the flattened input to the logits."""

from __future__ import annotations

from typing import Any

import keras

from trainer.models import arguments
from trainer.models.spec import InputSpec, scaled_input


def softmax(spec: InputSpec, *, kernel_initializer: Any = "glorot_uniform") -> keras.Model:
    """Return the model; its softmax stands in the loss, so the outputs are logits.

    `kernel_initializer` is the name of a Keras initializer, or a mapping of `class_name` and
    `config` for one with arguments.
    """
    given, x = scaled_input(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    initializer = arguments.initializer("kernel_initializer", kernel_initializer)
    logits = keras.layers.Dense(
        spec.num_classes, kernel_initializer=initializer, dtype="float32", name="logits"
    )(x)
    return keras.Model(given, logits, name="softmax")
