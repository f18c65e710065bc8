"""Network over sequences: of numbers, of vectors, of ids and of texts, whatever their length.

A place of a sequence is a row of an embedding for its id or its text, its numbers, and how far on
it is. Residual convolutions look at the places around it; each block has half the places of the one
before, so that it looks twice as far (Johnson and Zhang 2017, "Deep Pyramid Convolutional Neural
Networks for Text Categorization"; the normalization is first in a block, as Xiong et al. 2020 have
it). The largest values of each block over the places of an example, and their mean in the
beginning, are what a sequence is; other inputs are taken as by `tabular`. What a batch is padded
with counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.features.names import length_name
from flotilla.trainer.models.spec import InputSpec, layer_name, share, size
from flotilla.trainer.models.tabular import PIECES, KnownPlaces, Places, network
from flotilla.trainer.runtime.errors import ConfigError

# Of a sequence of vectors: length and size.
_VECTORS = 2
# Places that a convolution takes.
_WIDTH = 3
# Of larger ids several share a row.
_MOST_IDS = 1 << 16
# Below any value, also in half precision.
_FAR = 1e4
# A text that fewer training examples have is as one that none has.
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
    """Return convolutions over each sequence, ReLU layers over all inputs, and the outputs.

    Args:
        spec: sequences of numbers, vectors, ids or texts, and inputs that `tabular` takes.
        hidden_units: of the layers over all inputs together, each followed by `dropout`.
        dimension: of a place of a sequence, and of a row of an embedding.
        blocks: of convolutions, of which each looks twice as far as the one before.
        words: that are taken of a text that is no sequence.
        dropout: the share of units that a step leaves out.
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
    """Return rows of numbers [n, units] of a sequence of channels [n, length, ...]."""
    layers, ops = keras.layers, keras.ops
    count = ops.sum(known, axis=1)
    # Of a sequence without a place all of it is zero.
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
        # What is no place is no largest value either.
        x = x + y + (known - 1) * _FAR
        found.append(ops.max(x, axis=1) * some)
    return [*found, ops.log(1 + count)]


def _channels(places: Places, name: str, x: Any, dimension: int) -> tuple[list[Any], Any]:
    """Return numbers of each place [n, length, ...], and which places there are."""
    spec, ops, shape = places.spec, keras.ops, tuple(x.shape[1:])
    length = places.given.get(length_name(name))
    if x.dtype == "string":
        if len(shape) != 1:
            raise ConfigError(f"takes lists of texts, and {name!r} has the shape {shape}")
        layer = spec.vocabulary(name, least=_LEAST, padding=True)
        numbers = layer(x)
        # Padding is a text without a letter, number 1.
        return [_rows(name, numbers, layer.size, dimension)], _known(
            name, ops.where(ops.equal(numbers, 1), 0, numbers + 1), length
        )
    if len(shape) > _VECTORS:
        raise ConfigError(f"takes sequences of numbers or of vectors, and {name!r} has {shape}")
    known = _known(name, x, length)
    found = []
    statistics, whole = spec.statistics(name), "int" in x.dtype
    if whole and (statistics.least or 0) >= 0 and len(shape) == 1:
        rows = min(int(statistics.most or 1) + 2, _MOST_IDS)
        found.append(_rows(name, x, rows, dimension))
    x = spec.normalization(name)(x)
    x = ops.expand_dims(x, -1) if len(shape) == 1 else x
    missing = ops.isnan(x)
    x = ops.where(missing, 0.0, x)
    # As it is near the mean; one that is far away is so by its digits.
    found.append(ops.sign(x) * ops.log(1 + ops.abs(x)))
    if statistics.missing:
        found.append(ops.cast(missing, x.dtype))
    return found, known


def _known(name: str, x: Any, length: Any) -> Any:
    given = [x] if length is None else [x, length]
    return KnownPlaces(name=layer_name(name, "places"))(given)


def _rows(name: str, numbers: Any, rows: int, dimension: int) -> Any:
    return ShardedEmbedding(
        rows, dimension, shards=1, unknown="wrap", name=layer_name(name, "embedding")
    )(numbers)
