"""A text as rows of numbers: a weighed bag of its words and of pairs of them.

Each word and each pair of neighbours that the training split knows has a row of an embedding; a
text is the sum of its rows, weighed by how rare each is and brought to a length of one (tf-idf:
Salton and Buckley 1988; a bag of pairs: Wang and Manning 2012, Joulin et al. 2016). What a text
repeats counts once. Training leaves terms out at random, which is to a linear model what an L2
penalty of rare terms is (Wager, Wang, Liang 2013). The bag reaches the outputs both straight and
through hidden layers (Cheng et al. 2016, "Wide & Deep Learning").
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.features.statistics.statistics import FeatureStatistics
from flotilla.trainer.models.spec import InputSpec, layer_name

# Examples that a term needs to be known.
_LEAST = 2
# Steps of the weights of terms, from that of the rarest to that of the most frequent one.
_LEVELS = 64
# Whose length a text is brought to: rows of a bag begin small, and steps of Adam are of one size.
_LENGTH = 3.0
# The share of terms that a step leaves out.
_DROPOUT = 0.3


def text_features(spec: InputSpec, name: str, x: Any, *, dimension: int, words: int) -> Any:
    """Return [n, dimension] of the texts `x` [n] of a feature.

    Args:
        spec: of the model.
        name: of the feature.
        x: its texts.
        dimension: of the row of a term.
        words: of a text, and pairs of it, that are looked at.
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
    # What a text repeats stands side by side.
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
    """Return at which numbers of terms another weight begins, and each weight."""
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
    """Return the mean of the rows of words, as of datasets that know no pairs."""
    rows = layer(numbers)
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(numbers, 0), rows.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(there, axis=1), 1)
    return keras.ops.sum(rows * there, axis=1) / count
