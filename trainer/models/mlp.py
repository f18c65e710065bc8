"""Multi-layer perceptron on the flattened input."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from trainer.models import arguments
from trainer.models.spec import InputSpec, scaled_input


def mlp(
    spec: InputSpec, *, hidden_units: Sequence[int] = (100,), dropout: float = 0.0
) -> keras.Model:
    """Return ReLU layers of `hidden_units`, each followed by `dropout`, and the logits."""
    given, x = scaled_input(spec)
    logits = dense_head(x, spec.num_classes, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, logits, name="mlp")


def dense_head(
    x: keras.KerasTensor, num_classes: int, *, hidden_units: Sequence[int], dropout: float
) -> keras.KerasTensor:
    """Return logits of the flattened `x` through ReLU layers with dropout after each."""
    rate = arguments.share("dropout", dropout)
    x = keras.layers.Flatten(name="flatten")(x)
    for index, units in enumerate(arguments.sizes("hidden_units", hidden_units)):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{index}")(x)
        if rate:
            x = keras.layers.Dropout(rate, name=f"dropout_{index}")(x)
    return keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)
