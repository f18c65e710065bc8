"""Built-in models: perceptron, softmax regression, convolutional and recurrent networks.

All end in linear layers, one for each output of the task: logits of a classifier, numbers of a
regression.
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
    """Return ReLU layers of `hidden_units`, each followed by `dropout`, and the outputs."""
    given, x = scaled_input(spec)
    x = hidden(x, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, outputs(spec, x), name="mlp")


def outputs(spec: InputSpec, x: keras.KerasTensor, **named: Any) -> Any:
    """Return a linear layer of `x` [n, units] for each output of the task, by name.

    Other arguments are passed to `keras.layers.Dense`.

    Raises:
        ConfigError: an output may have any size.
    """
    if isinstance(spec.output_shape, Mapping):
        return {
            name: _linear(x, shape, layer_name(name, "output"), named)
            for name, shape in spec.output_shape.items()
        }
    return _linear(x, spec.output_shape, "logits", named)


def _linear(x: Any, shape: Shape, name: str, named: Mapping[str, Any]) -> Any:
    if min(shape, default=0) < 1:
        raise ConfigError(f"gives outputs of one shape, not {shape}; write your own model")
    x = keras.layers.Dense(math.prod(shape), dtype="float32", name=name, **named)(x)
    if len(shape) == 1:
        return x
    return keras.layers.Reshape(shape, dtype="float32", name=f"{name}_shape")(x)


def hidden(
    x: keras.KerasTensor, *, hidden_units: Sequence[int], dropout: float
) -> keras.KerasTensor:
    """Return `x`, flattened and passed through ReLU layers with dropout after each."""
    rate = share("dropout", dropout)
    x = keras.layers.Flatten(name="flatten")(x)
    for index, units in enumerate(sizes("hidden_units", hidden_units)):
        x = keras.layers.Dense(units, activation="relu", name=f"hidden_{index}")(x)
        if rate:
            x = keras.layers.Dropout(rate, name=f"dropout_{index}")(x)
    return x


def softmax(spec: InputSpec, *, kernel_initializer: Any = "glorot_uniform") -> keras.Model:
    """Return softmax regression; the loss contains the softmax, so the outputs are logits.

    `kernel_initializer` is the name of a Keras initializer, or a mapping of `class_name` and
    `config` for one with arguments.
    """
    given, x = scaled_input(spec)
    x = keras.layers.Flatten(name="flatten")(x)
    weights = initializer("kernel_initializer", kernel_initializer)
    return keras.Model(given, outputs(spec, x, kernel_initializer=weights), name="softmax")


FLAT_IMAGE = 2
DEEP_IMAGE = 3
# Augmentation, in shares of a full turn (10 degrees) and of the sides of an image.
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
    """Return a convolution with 2x2 pooling per filter count, hidden layers, and the outputs.

    Images are (height, width, channels), or (height, width) for one channel; `dropout` follows each
    hidden layer. With `augment`, training moves, turns and resizes each image a little at random.
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
    if flag("augment", augment):
        x = Augmentation(name="augmentation")(x)
    kernel = size("kernel_size", kernel_size)
    for index, count in enumerate(sizes("filters", filters)):
        x = keras.layers.Conv2D(
            count, kernel, padding="same", activation="relu", name=f"convolution_{index}"
        )(x)
        # "same" rounds up, so that repeated pooling leaves at least one pixel.
        x = keras.layers.MaxPooling2D(2, padding="same", name=f"pool_{index}")(x)
    x = hidden(x, hidden_units=hidden_units, dropout=dropout)
    return keras.Model(given, outputs(spec, x), name="cnn")


@keras.saving.register_keras_serializable(package="flotilla")
class Augmentation(keras.layers.Layer):
    """Moves, turns and resizes each image a little at random, in training only.

    Nothing is mirrored: a digit, a letter or a road sign is another one in a mirror. Keras's own
    layers also change images where a model is called without `training`; this one does not, and a
    `.keras` file is written without it.
    """

    def build(self, shape: Any) -> None:
        """Create the seeds of the random changes."""
        layers = keras.layers
        # The edge of an image continues outwards, since its background may have any colour.
        self.steps = [
            layers.RandomRotation(TURN, fill_mode="nearest", name="turn"),
            layers.RandomZoom(ZOOM, fill_mode="nearest", name="zoom"),
            layers.RandomTranslation(MOVE, MOVE, fill_mode="nearest", name="move"),
        ]
        super().build(shape)

    def call(self, images: Any, training: bool = False) -> Any:
        """Return images [n, height, width, channels], changed in training."""
        for step in self.steps if training else ():
            images = step(images, training=True)
        return images

    def compute_output_shape(self, shape: Any) -> Any:
        """Return the shape of the images, which is unchanged."""
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
    """Return an embedding, a gated recurrent unit (Cho et al. 2014), and the outputs.

    Tokens are whole numbers from 1 to `vocabulary - 1`; 0 is padding, which Keras masks.
    """
    places = tuple(spec.shape) if not isinstance(spec.shape, Mapping) else ()
    if len(places) != 1 or "int" not in str(spec.dtype):
        raise ConfigError(
            f"takes one sequence of whole numbers, not {spec.dtype} of shape {spec.shape}"
        )
    given = spec.symbols()
    x = keras.layers.Embedding(
        size("vocabulary", vocabulary), size("dimension", dimension), mask_zero=True, name="tokens"
    )(given)
    shape = spec.output_shape
    each_place = not isinstance(shape, Mapping) and _sizes(shape[:-1]) == places
    layer = keras.layers.GRU(size("units", units), return_sequences=each_place, name="gru")
    if bidirectional:
        layer = keras.layers.Bidirectional(layer, name="both_ways")
    x = layer(x)
    if each_place:
        logits = keras.layers.Dense(spec.num_classes, dtype="float32", name="logits")(x)
        return keras.Model(given, logits, name="gru")
    return keras.Model(given, outputs(spec, x), name="gru")


def _sizes(shape: tuple[int, ...]) -> tuple[int | None, ...]:
    return tuple(None if size < 0 else size for size in shape)
