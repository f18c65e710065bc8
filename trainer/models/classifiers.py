"""Multi-layer perceptron on the flattened input.

Softmax regression: one linear layer from the flattened input to the logits.

Convolutional network for images: convolution and pooling by turns, then dense layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from trainer.errors import ConfigError
from trainer.models.spec import InputSpec, initializer, scaled_input, share, size, sizes


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
    rate = share("dropout", dropout)
    x = keras.layers.Flatten(name="flatten")(x)
    for index, units in enumerate(sizes("hidden_units", hidden_units)):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{index}")(x)
        if rate:
            x = keras.layers.Dropout(rate, name=f"dropout_{index}")(x)
    return keras.layers.Dense(num_classes, dtype="float32", name="logits")(x)


def softmax(spec: InputSpec, *, kernel_initializer: Any = "glorot_uniform") -> keras.Model:
    """Return the model; its softmax is part of the loss, so the outputs are logits.

    `kernel_initializer` is the name of a Keras initializer, or a mapping of `class_name` and
    `config` for one with arguments.
    """
    given, x = scaled_input(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    weights = initializer("kernel_initializer", kernel_initializer)
    logits = keras.layers.Dense(
        spec.num_classes, kernel_initializer=weights, dtype="float32", name="logits"
    )(x)
    return keras.Model(given, logits, name="softmax")


FLAT_IMAGE = 2
DEEP_IMAGE = 3


def cnn(
    spec: InputSpec,
    *,
    filters: Sequence[int] = (32, 64),
    kernel_size: int = 3,
    hidden_units: Sequence[int] = (128,),
    dropout: float = 0.0,
) -> keras.Model:
    """Return one convolution with 2x2 pooling for each of `filters`, `hidden_units`, the logits.

    Images are (height, width, channels), or (height, width) for one channel; `dropout` follows
    each hidden layer.
    """
    given, x = scaled_input(spec)
    shape = tuple(spec.shape)
    if len(shape) not in {FLAT_IMAGE, DEEP_IMAGE}:
        raise ConfigError(
            f"takes images of (height, width, channels), the dataset's input has the shape {shape};"
            " use mlp or softmax"
        )
    if len(shape) == FLAT_IMAGE:
        x = keras.layers.Reshape((*shape, 1), name="one_channel")(x)
    kernel = size("kernel_size", kernel_size)
    for index, count in enumerate(sizes("filters", filters)):
        x = keras.layers.Conv2D(
            count, kernel, padding="same", activation="relu", name=f"convolution_{index}"
        )(x)
        # "same" rounds up, so that any number of poolings leaves an image of at least one pixel.
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool_{index}")(x)
    logits = dense_head(x, spec.num_classes, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, logits, name="cnn")
