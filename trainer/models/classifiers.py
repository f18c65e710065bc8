"""Built-in models: multilayer perceptron, softmax regression, convolutional and recurrent networks.

Each model ends in one linear layer per output of the task. This layer returns logits for a
classification and numbers for a regression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from flotilla.trainer.models.spec import (
    InputSpec,
    Shape,
    flag,
    initializer,
    layer_name,
    scaled_input,
    share,
    size,
    sizes,
)
from flotilla.trainer.runtime.errors import ConfigError


def mlp(
    spec: InputSpec, *, hidden_units: Sequence[int] = (100,), dropout: float = 0.0
) -> keras.Model:
    """Return a model of ReLU layers, each followed by dropout."""
    given, x = scaled_input(spec)
    x = hidden(x, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, outputs(spec, x), name="mlp")


def outputs(spec: InputSpec, x: keras.KerasTensor, **named: Any) -> Any:
    """Apply a linear layer to `x` [n, units] for each output of the task.

    Return a tensor, or a mapping by name if there are several outputs. `named` is passed to
    `keras.layers.Dense`.

    Raises:
        ConfigError: an output has no fixed size.
    """
    if isinstance(spec.output_shape, Mapping):
        return {
            name: _linear(x, shape, layer_name(name, "output"), named)
            for name, shape in spec.output_shape.items()
        }
    return _linear(x, spec.output_shape, "logits", named)


def _linear(x: Any, shape: Shape, name: str, named: Mapping[str, Any]) -> Any:
    if min(shape, default=0) < 1:
        raise ConfigError(f"outputs must have a fixed shape, not {shape}; write your own model")
    x = keras.layers.Dense(math.prod(shape), dtype="float32", name=name, **named)(x)
    if len(shape) == 1:
        return x
    return keras.layers.Reshape(shape, dtype="float32", name=f"{name}_shape")(x)


def hidden(
    x: keras.KerasTensor, *, hidden_units: Sequence[int], dropout: float
) -> keras.KerasTensor:
    """Flatten `x` and apply ReLU layers, each followed by dropout."""
    rate = share("dropout", dropout)
    x = keras.layers.Flatten(name="flatten")(x)
    for index, units in enumerate(sizes("hidden_units", hidden_units)):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{index}")(x)
        if rate:
            x = keras.layers.Dropout(rate, name=f"dropout_{index}")(x)
    return x


def softmax(spec: InputSpec, *, kernel_initializer: Any = "glorot_uniform") -> keras.Model:
    """Return a softmax regression. Its outputs are logits, because the loss applies the softmax.

    `kernel_initializer` is the name of a Keras initializer, or a mapping with `class_name` and
    `config`.
    """
    given, x = scaled_input(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    weights = initializer("kernel_initializer", kernel_initializer)
    return keras.Model(given, outputs(spec, x, kernel_initializer=weights), name="softmax")


FLAT_IMAGE, DEEP_IMAGE = 2, 3
# Limits of the augmentation: the rotation (10 degrees) as a fraction of a full turn, and the zoom
# and the translation as fractions of the image's size.
TURN, ZOOM, MOVE = 10 / 360, 0.1, 0.1


def cnn(  # noqa: PLR0913
    spec: InputSpec,
    *,
    filters: Sequence[int] = (32, 64),
    kernel_size: int = 3,
    hidden_units: Sequence[int] = (128,),
    dropout: float = 0.0,
    augment: bool = False,
) -> keras.Model:
    """Return a model of convolutions with 2x2 pooling, one per filter count, and hidden layers.

    Images are [height, width, channels], or [height, width] for one channel. `dropout` is applied
    after each hidden layer. With `augment`, each image is slightly moved, rotated and resized at
    random during training.
    """
    given, x = scaled_input(spec)
    shape = tuple(spec.shape)
    if len(shape) not in {FLAT_IMAGE, DEEP_IMAGE}:
        raise ConfigError(
            "images must have the shape (height, width) or (height, width, channels), but the "
            f"dataset's input has the shape {shape}; use mlp or softmax"
        )
    if len(shape) == FLAT_IMAGE:
        x = keras.layers.Reshape((*shape, 1), name="one_channel")(x)
    if flag("augment", augment):
        x = Augmentation(name="augmentation")(x)
    kernel = size("kernel_size", kernel_size)
    for index, count in enumerate(sizes("filters", filters)):
        x = keras.layers.Conv2D(
            count, kernel, padding="same", activation="relu", name=f"convolution_{index}"
        )(x)
        # "same" rounds sizes up, so at least one pixel remains after any number of poolings.
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool_{index}")(x)
    x = hidden(x, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, outputs(spec, x), name="cnn")


@keras.saving.register_keras_serializable(package="flotilla")
class Augmentation(keras.layers.Layer):
    """Slightly moves, rotates and resizes each image at random, but only in training.

    Images are not flipped, because a flipped digit, letter or road sign has another meaning.
    Keras's own layers also change images if a model is called without `training`. This layer does
    not, and it is left out of `.keras` files.
    """

    def build(self, shape: Any) -> None:
        """Create the layers, each with its own random seed."""
        layers = keras.layers
        # Fill new areas with the edge pixels, because an image's background may have any color.
        self.steps = [
            layers.RandomRotation(TURN, fill_mode="nearest", name="turn"),
            layers.RandomZoom(ZOOM, fill_mode="nearest", name="zoom"),
            layers.RandomTranslation(MOVE, MOVE, fill_mode="nearest", name="move"),
        ]
        super().build(shape)

    def call(self, images: Any, training: bool = False) -> Any:
        """Return the images [n, height, width, channels], changed at random only in training."""
        for step in self.steps if training else ():
            images = step(images, training=True)
        return images

    def compute_output_shape(self, shape: Any) -> Any:
        """Return the shape of the input."""
        return shape

    def plain(self, images: Any, **_training: Any) -> Any:
        """Return the images unchanged."""
        return images


def gru(
    spec: InputSpec,
    *,
    vocabulary: int,
    dimension: int = 16,
    units: int = 32,
    bidirectional: bool = False,
) -> keras.Model:
    """Return a model of an embedding and a gated recurrent unit (Cho et al. 2014).

    Tokens are integers from 1 to `vocabulary - 1`. 0 is padding, which Keras masks.
    """
    places = tuple(spec.shape) if not isinstance(spec.shape, Mapping) else ()
    if len(places) != 1 or "int" not in str(spec.dtype):
        raise ConfigError(
            f"the input must be one sequence of integers, not {spec.dtype} of shape {spec.shape}"
        )
    given = spec.symbols()
    x = keras.layers.Embedding(
        size("vocabulary", vocabulary), size("dimension", dimension), mask_zero=True, name="tokens"
    )(given)
    shape = spec.output_shape
    sizes_of = [] if isinstance(shape, Mapping) else [None if n < 0 else n for n in shape[:-1]]
    each_place = sizes_of == [*places]
    layer = keras.layers.GRU(size("units", units), return_sequences=each_place, name="gru")
    if bidirectional:
        layer = keras.layers.Bidirectional(layer, name="both_ways")
    x = layer(x)
    if each_place:
        logits = keras.layers.Dense(spec.num_classes, dtype="float32", name="logits")(x)
        return keras.Model(given, logits, name="gru")
    return keras.Model(given, outputs(spec, x), name="gru")
