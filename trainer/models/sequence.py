"""A network for sequences of numbers, vectors, ids or strings of any length.

A position of a sequence is encoded by the embedding row of its id or string, its numbers, and its
relative index. Residual convolutions combine neighboring positions. Each block has half as many
positions as the previous one, so its receptive field doubles (Johnson and Zhang 2017, "Deep Pyramid
Convolutional Neural Networks for Text Categorization"; pre-normalization as in Xiong et al. 2020).
A sequence is represented by the maximum of each block over the positions, the mean of the first
layer over the positions, and the logarithm of its length. Other inputs are encoded as in `tabular`.
Padding is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from flotilla.trainer.models.spec import InputSpec, layer_name, share, size
from flotilla.trainer.models.tabular import PIECES, Places, embedding, network
from flotilla.trainer.runtime.errors import ConfigError

# Rank of a sequence of vectors (length and size), and kernel size of a convolution.
_VECTORS = 2
_WIDTH = 3
# Maximum number of embedding rows. Larger ids share a row with other ids.
_MOST_IDS = 1 << 16
# Offset that makes padding smaller than all other values, also in half precision.
_FAR = 1e4
# Minimum number of training examples in which a string must occur to be known.
_LEAST = 2


def sequence(  # noqa: PLR0913
    spec: InputSpec,
    *,
    hidden_units: Sequence[int] = (64,),
    dimension: int = 48,
    blocks: int = 6,
    words: int = 200,
    dropout: float = 0.2,
) -> keras.Model:
    """Return a model with convolutions on each sequence, and ReLU layers on all inputs together.

    Args:
        spec: sequences of numbers, vectors, ids or strings, and any inputs of `tabular`.
        hidden_units: the sizes of the layers on all inputs, each followed by dropout.
        dimension: the number of units per position of a sequence, and the size of an embedding row.
        blocks: the number of convolution blocks. Each one doubles the receptive field.
        words: the maximum number of words to use from a text that is not a sequence.
        dropout: the fraction of units that a training step drops.
    """
    rate, count = share("dropout", dropout), size("blocks", blocks)

    def pooled(places: Places, name: str, x: Any) -> list[Any]:
        units = size("dimension", dimension)
        channels, known = _channels(places, name, x, units)
        return _pooled(name, channels, known, units=units, blocks=count, rate=rate)

    return network(
        spec, "sequence", hidden_units=hidden_units, dimension=dimension, words=words,
        dropout=dropout, pieces=PIECES, of_sequence=pooled,
    )  # fmt: skip


def _pooled(  # noqa: PLR0913
    name: str, channels: Sequence[Any], known: Any, *, units: int, blocks: int, rate: float
) -> list[Any]:
    """Return the arrays that represent a sequence with these channels [n, length, ...]."""
    layers, ops = keras.layers, keras.ops
    count = ops.sum(known, axis=1)
    # A sequence without valid positions is encoded as zeros.
    some = ops.minimum(count, 1)
    begin = ops.cumsum(known, axis=1) / ops.maximum(ops.expand_dims(count, -1), 1)
    x = layers.Concatenate(name=layer_name(name, "channels"))([*channels, begin])
    x = layers.Dense(units, name=layer_name(name, "units"))(x) * known
    found = [ops.sum(x, axis=1) / ops.maximum(count, 1)]
    for index in range(blocks):
        if index:
            x = layers.MaxPooling1D(2, padding="same", name=layer_name(name, f"pool_{index}"))(x)
            known = layers.MaxPooling1D(
                2, padding="same", name=layer_name(name, f"places_{index}")
            )(known)
            x = x * known
        y = layers.LayerNormalization(name=layer_name(name, f"normal_{index}"))(x) * known
        y = layers.Conv1D(
            units, _WIDTH, padding="same", activation="relu",
            name=layer_name(name, f"convolution_{index}"),
        )(y)  # fmt: skip
        if rate:
            y = layers.Dropout(rate, name=layer_name(name, f"dropout_{index}"))(y)
        y = layers.Dense(units, name=layer_name(name, f"mix_{index}"))(y)
        # Make padding smaller than all values, so that it is never the maximum.
        x = x + y + (known - 1) * _FAR
        found.append(ops.max(x, axis=1) * some)
    return [*found, ops.log(1 + count)]


def _channels(places: Places, name: str, x: Any, dimension: int) -> tuple[list[Any], Any]:
    """Return the channels of a sequence [n, length, ...], and the mask of valid positions."""
    spec, ops, shape = places.spec, keras.ops, tuple(x.shape[1:])
    if x.dtype == "string":
        if len(shape) != 1:
            raise ConfigError(f"{name!r} must be a list of strings, but has the shape {shape}")
        layer = spec.vocabulary(name, least=_LEAST, padding=True)
        numbers = layer(x)
        # Padding is the empty string, which has the number 1.
        known = places.known(name, ops.where(ops.equal(numbers, 1), 0, numbers + 1))
        return [embedding(name, layer.size, dimension)(numbers)], known
    if len(shape) > _VECTORS:
        raise ConfigError(
            f"{name!r} must be a sequence of numbers or vectors, but has the shape {shape}"
        )
    known = places.known(name, x)
    found = []
    statistics, whole = spec.statistics(name), "int" in x.dtype
    if whole and (statistics.least or 0) >= 0 and len(shape) == 1:
        rows = min(int(statistics.most or 1) + 2, _MOST_IDS)
        found.append(embedding(name, rows, dimension)(x))
    x = spec.normalization(name)(x)
    x = ops.expand_dims(x, -1) if len(shape) == 1 else x
    missing = ops.isnan(x)
    x = ops.where(missing, 0.0, x)
    # Apply sign(x) log(1 + |x|), which is nearly linear at the mean and logarithmic far from it.
    found.append(ops.sign(x) * ops.log(1 + ops.abs(x)))
    if statistics.missing:
        found.append(ops.cast(missing, x.dtype))
    return found, known
