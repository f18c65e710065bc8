"""Convolutional network for images: convolution and pooling by turns, then dense layers."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from trainer.errors import ConfigError
from trainer.models import arguments
from trainer.models.mlp import dense_head
from trainer.models.spec import InputSpec, scaled_input

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
    kernel = arguments.size("kernel_size", kernel_size)
    for index, count in enumerate(arguments.sizes("filters", filters)):
        x = keras.layers.Conv2D(
            count, kernel, padding="same", activation="relu", name=f"convolution_{index}"
        )(x)
        # "same" rounds up, so that any number of poolings leaves an image of at least one pixel.
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool_{index}")(x)
    logits = dense_head(x, spec.num_classes, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, logits, name="cnn")
