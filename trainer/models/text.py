"""Converts a text to a vector: a weighted bag of its words and word pairs.

Each word and each pair of consecutive words in the training vocabulary has an embedding row. A text
is the sum of its rows, weighted by rarity and normalized to a fixed length (tf-idf: Salton and
Buckley 1988; bags of pairs: Wang and Manning 2012, Joulin et al. 2016). Repeated terms count once.
Training drops terms at random, which for a linear model acts like an adaptive L2 penalty (Wager,
Wang, Liang 2013). The bag is passed to the outputs directly and through hidden layers (Cheng et al.
2016, "Wide & Deep Learning").
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.features.statistics.statistics import FeatureStatistics
from flotilla.trainer.models.spec import InputSpec, layer_name

# Minimum number of training examples in which a term must occur to be known.
_LEAST = 2
# Number of levels to which the weights of words, and of pairs, are rounded.
_LEVELS = 64
# Euclidean norm of the term weights of a text. It is above 1, because initial rows are small and
# Adam changes them in steps of a fixed size.
_LENGTH = 3.0
# Fraction of the terms that a training step drops.
_DROPOUT = 0.3


def text_features(spec: InputSpec, name: str, x: Any, *, dimension: int, words: int) -> Any:
    """Return the vectors [n, dimension] of the texts `x` [n] of a feature.

    Args:
        spec: the spec of the model.
        name: the name of the feature.
        x: the texts of the feature.
        dimension: the size of a term's embedding row.
        words: the maximum number of words, and of pairs, to use from a text.
    """
    known = spec.statistics(name)
    if not known.pairs:
        layer = spec.words(name, words)
        return _mean(layer(x), _rows(name, layer.size, dimension))
    singles = spec.words(name, None, least=_LEAST)
    pairs = spec.words(name, None, ngram=2, least=_LEAST)
    first, second = singles(x)[:, :words], pairs(x)[:, :words]
    size = singles.size
    numbers = keras.ops.concatenate([first, keras.ops.where(second > 1, second + size, 0)], axis=1)
    numbers = keras.ops.sort(numbers, axis=1)
    steps, values = _levels(known, size)
    level = keras.layers.Discretization(steps, name=layer_name(name, "level"))
    weights = keras.ops.take(np.array(values, np.float32), level(numbers), axis=0)
    # After sorting, equal terms are consecutive.
    is_new = keras.ops.not_equal(numbers[:, 1:], numbers[:, :-1])
    is_new = keras.ops.pad(is_new, [(0, 0), (1, 0)], constant_values=True)
    weights = weights * keras.ops.cast(is_new, weights.dtype)
    length = keras.ops.sqrt(keras.ops.sum(keras.ops.square(weights), axis=1, keepdims=True) + 1e-6)
    weights = keras.layers.Dropout(_DROPOUT, name=layer_name(name, "dropout"))(
        weights * _LENGTH / length
    )
    rows = _rows(name, size + pairs.size, dimension)(numbers)
    return keras.ops.einsum("nt,ntd->nd", weights, rows)


def _levels(known: FeatureStatistics, size: int) -> tuple[list[int], list[float]]:
    """Return the term numbers at which the weight changes, and the weights between them."""
    steps, values = [], [0.0]
    for counts, offset in ((known.words, 0), (known.pairs, size)):
        count = np.array([each for each in counts.values() if each >= _LEAST], np.float64)
        if not len(count):
            continue
        weights = np.log((1 + known.examples) / (1 + count)) + 1
        of_level = np.linspace(weights[0], weights[-1], _LEVELS)
        begins = np.searchsorted(weights, of_level[:-1], side="left")
        steps += [offset + 2, *(offset + 2 + begins[1:]).tolist(), offset + 2 + len(count)]
        values += [*of_level[:-1].tolist(), 0.0]
    return steps, values


def _rows(name: str, rows: int, dimension: int) -> ShardedEmbedding:
    return ShardedEmbedding(
        rows, dimension, shards=1, unknown="wrap", name=layer_name(name, "embedding")
    )


def _mean(numbers: Any, layer: ShardedEmbedding) -> Any:
    """Return the mean embedding row of the words, for older datasets, which store no pairs."""
    rows = layer(numbers)
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(numbers, 0), rows.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(there, axis=1), 1)
    return keras.ops.sum(rows * there, axis=1) / count
