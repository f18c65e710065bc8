"""Networks for the columns of a table: numbers, classes, texts and sequences.

A number is encoded by its position between the quantiles of the training examples, and a separate
layer for each number maps the encoding to several units (piecewise linear encoding: Gorishniy et
al. 2022, "On Embeddings for Numerical Features in Tabular Deep Learning"). As in a decision tree,
the effect of a number need not be monotonic, and outliers have a limited effect. Missing numbers
are marked. Classes and repeated strings have embedding rows. Other strings are bags of words
(`text_features`), which also bypass the hidden layers. A sequence of numbers passes through
convolutions, with mean and maximum pooling over its positions. Padding is ignored.

A text is converted to a vector: a weighted bag of its words and word pairs. Each word and each pair
of consecutive words in the training vocabulary has an embedding row. A text is the sum of its rows,
weighted by rarity and normalized to a fixed length (tf-idf: Salton and Buckley 1988; bags of pairs:
Wang and Manning 2012, Joulin et al. 2016). Repeated terms count once. Training drops terms at
random, which for a linear model acts like an adaptive L2 penalty (Wager, Wang, Liang 2013). The bag
is passed to the outputs directly and through hidden layers (Cheng et al. 2016, "Wide & Deep
Learning").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.features.names import length_name
from flotilla.trainer.features.statistics.statistics import NUMBER, FeatureStatistics, are_repeated
from flotilla.trainer.models.classifiers import hidden, outputs
from flotilla.trainer.models.preprocessing import Normalization
from flotilla.trainer.models.spec import InputSpec, layer_name, share, size
from flotilla.trainer.runtime.errors import ConfigError

# Rank of a sequence of vectors (length and size), number of convolution layers, and kernel size.
_VECTORS, _CONVOLUTIONS, _WIDTH = 2, 2, 5
# In `sequence`: kernel size of a convolution.
_BLOCK_WIDTH = 3
# In `sequence`: maximum number of embedding rows. Larger ids share a row with other ids.
_MOST_IDS = 1 << 16
# Offset that makes padding smaller than all other values, also in half precision.
_FAR = 1e4
# Number of units for each number, and the maximum number of units for all numbers together.
_UNITS, _MOST_UNITS = 8, 2048
PIECES = 16
# Encodes a sequence as arrays [n, units], given all inputs, the sequence's name and its tensor.
OfSequence = Callable[["Places", str, Any], list[Any]]


def tabular(  # noqa: PLR0913
    spec: InputSpec,
    *,
    hidden_units: Sequence[int] = (128, 128),
    dimension: int = 16,
    words: int = 200,
    dropout: float = 0.1,
    pieces: int = PIECES,
) -> keras.Model:
    """Return a model with ReLU layers on all inputs together.

    Args:
        spec: inputs that are single numbers, classes or strings, tensors of numbers of a fixed
            shape, or sequences of numbers or vectors of any length.
        hidden_units: the sizes of the layers, each followed by dropout.
        dimension: the size of an embedding row.
        words: the maximum number of words to use from a text.
        dropout: the fraction of units that a training step drops.
        pieces: the maximum number of quantile intervals of a number, or 0 to normalize it instead.
    """
    return network(
        spec, "tabular", hidden_units=hidden_units, dimension=dimension, words=words,
        dropout=dropout, pieces=pieces,
    )  # fmt: skip


def text(
    spec: InputSpec,
    *,
    hidden_units: Sequence[int] = (64,),
    dimension: int = 32,
    words: int = 400,
    dropout: float = 0.3,
) -> keras.Model:
    """Return a `tabular` network with default sizes for text inputs."""
    return network(
        spec, "text", hidden_units=hidden_units, dimension=dimension, words=words,
        dropout=dropout, pieces=PIECES,
    )  # fmt: skip


def network(  # noqa: PLR0913
    spec: InputSpec,
    name: str,
    *,
    hidden_units: Sequence[int],
    dimension: int,
    words: int,
    dropout: float,
    pieces: int,
    of_sequence: OfSequence | None = None,
) -> keras.Model:
    """Return a network on all inputs together. `of_sequence` encodes the sequences among them."""
    given = spec.symbols()
    named = given if isinstance(given, Mapping) else dict(zip(spec.names, [given], strict=True))
    places = Places(spec, named, size("dimension", dimension), size("words", words), of_sequence)
    cut = places.numbers() if pieces else []
    found = places.pieces(cut, size("pieces", pieces)) if cut else []
    found += [each for name, x in named.items() if name not in cut for each in places.of(name, x)]
    x = keras.layers.Concatenate(name="all")(found) if len(found) > 1 else found[0]
    x = hidden(x, hidden_units=hidden_units, dropout=dropout)
    if places.bags:
        x = keras.layers.Concatenate(name="flotilla_past")([x, *places.bags])
    return keras.Model(given, _in_units(spec, outputs(spec, x)), name=name)


def _in_units(spec: InputSpec, found: Any) -> Any:
    """Scale outputs that are in the label's units, so that training starts near the mean."""
    if isinstance(found, Mapping):
        return {name: _scaled(spec, name, each) for name, each in found.items()}
    return _scaled(spec, spec.targets[0], found) if spec.targets else found


def _scaled(spec: InputSpec, target: str, x: Any) -> Any:
    known = spec.statistics(target) if target in spec.in_units else None
    if not known or known.kind != NUMBER or x.shape[1:] != (1,):
        return x
    return keras.layers.Rescaling(
        known.std or 1.0, known.mean or 0.0, dtype="float32", name=layer_name(target, "units")
    )(x)


@keras.saving.register_keras_serializable(package="flotilla")
class KnownPlaces(keras.layers.Layer):
    """Computes a mask [n, length, 1] that is 1 at the valid positions of padded sequences.

    If no length is given, a sequence ends at its last number that is not 0.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Create the layer. `kwargs` are the arguments of any Keras layer."""
        super().__init__(**{"autocast": False, **kwargs})

    def call(self, given: Sequence[Any]) -> Any:
        """Return the mask for a list of the sequences and, optionally, their lengths."""
        ops, x = keras.ops, given[0]
        there = ops.not_equal(x, ops.zeros_like(x))
        for _ in x.shape[2:]:
            there = ops.any(there, axis=-1)
        places = ops.cumsum(ops.ones_like(there, dtype="int32"), axis=1)
        if len(given) > 1:
            last = ops.reshape(ops.cast(given[1], "int32"), (-1, 1))
        else:
            last = ops.max(ops.where(there, places, 0), axis=1, keepdims=True)
        return ops.expand_dims(ops.cast(places <= last, self.compute_dtype), -1)

    #: This method replaces the layer in Keras files, which must not need code of this package.
    plain = call

    def compute_output_spec(self, given: Sequence[Any]) -> keras.KerasTensor:
        """Return the shape and type of the mask."""
        return keras.KerasTensor((*given[0].shape[:2], 1), self.compute_dtype)


@dataclass(frozen=True)
class Places:
    """Encodes each input of a model, keyed by name, as arrays [n, units]."""

    spec: InputSpec
    given: Mapping[str, Any]
    _dimension: int
    _words: int
    _of_sequence: OfSequence | None
    #: Bags of words that are also passed directly to the outputs.
    bags: list[Any] = field(default_factory=list)

    def of(self, name: str, x: Any) -> list[Any]:
        """Return the encoding of an input for the first layer."""
        shape = tuple(x.shape[1:])
        if shape and self._of_sequence:
            return self._of_sequence(self, name, x)
        if None in shape:
            return self._sequence(name, x, shape)
        if x.dtype == "string":
            return self._text(name, x, shape)
        if name in self.spec.classes and not shape:
            return [embedding(name, self.spec.classes[name], self._dimension)(x)]
        return self._numbers(name, x, shape)

    def known(self, name: str, x: Any) -> Any:
        """Return the mask [n, length, 1] of the valid positions of the sequence `x` of an input."""
        length = self.given.get(length_name(name))
        return KnownPlaces(name=layer_name(name, "places"))([x] if length is None else [x, length])

    def numbers(self) -> list[str]:
        """Return the names of inputs that are single numbers."""
        return [
            name
            for name, x in self.given.items()
            if name not in self.spec.classes and x.dtype != "string" and not x.shape[1:]
        ]

    def pieces(self, names: Sequence[str], most: int) -> list[Any]:
        """Encode numbers piecewise, and return their units and the mask of missing numbers."""
        cut = [_Cut(self.spec, name, most) for name in names]
        x = keras.ops.stack(
            [each.layer(self.given[name]) for each, name in zip(cut, names, strict=True)], axis=1
        )
        missing = keras.ops.isnan(x)
        # Replace a missing number by the median, which is 0 here. The mask below marks it only if
        # values of this input were missing in training.
        x = keras.ops.where(missing, 0.0, x)
        # Clip the numbers to the range of the training data, because infinity * 0 is NaN.
        low, high = np.stack([each.ends for each in cut], axis=1)
        x = keras.ops.minimum(keras.ops.maximum(x, low), high)
        x = keras.ops.expand_dims(x, -1)
        begins, steps = (np.stack(each) for each in zip(*(e.pieces() for e in cut), strict=True))
        x = keras.ops.clip((x - begins) * steps, 0.0, 1.0)
        units = max(1, min(_UNITS, _MOST_UNITS // len(names)))
        x = keras.layers.EinsumDense(
            "abc,bcd->abd", (len(names), units), bias_axes="bd", activation="relu",
            # About half of the pieces of a number are 1. With a mean weight other than 0, all units
            # would start with nearly equal values.
            kernel_initializer=keras.initializers.RandomNormal(stddev=most**-0.5),
            name="flotilla_pieces",
        )(x)  # fmt: skip
        found = [keras.layers.Flatten(name="flotilla_numbers")(x)]
        if gaps := [at for at, name in enumerate(names) if self.spec.statistics(name).missing]:
            found.append(keras.ops.take(keras.ops.cast(missing, x.dtype), gaps, axis=1))
        return found

    def _text(self, name: str, x: Any, shape: tuple[int, ...]) -> list[Any]:
        if shape:
            raise ConfigError(
                f"{name!r} must be one string per example, but has the shape {list(shape)}; use "
                "`sequence`"
            )
        known = self.spec.statistics(name)
        if are_repeated(known.distinct, known.examples):
            layer = self.spec.vocabulary(name)
            return [embedding(name, layer.size, self._dimension)(layer(x))]
        bag = text_features(self.spec, name, x, dimension=self._dimension, words=self._words)
        if known.pairs:
            self.bags.append(bag)
        return [bag]

    def _sequence(self, name: str, x: Any, shape: tuple[int | None, ...]) -> list[Any]:
        if x.dtype == "string" or len(shape) > _VECTORS:
            raise ConfigError(
                f"{name!r} must be a sequence of numbers or vectors, not {x.dtype} of shape "
                f"{shape}; use `sequence`, or write your own model"
            )
        known = self.known(name, x)
        x = self.spec.normalization(name)(x)
        x = keras.ops.where(keras.ops.isnan(x), 0.0, x)
        if len(shape) < _VECTORS:
            x = keras.ops.expand_dims(x, -1)
        x = x * known
        for index in range(_CONVOLUTIONS):
            layer = keras.layers.Conv1D(
                2 * self._dimension, _WIDTH, padding="same", activation="relu",
                name=layer_name(name, f"convolution_{index}"),
            )  # fmt: skip
            x = layer(x) * known
        count = keras.ops.maximum(keras.ops.sum(known, axis=1), 1)
        return [keras.ops.sum(x, axis=1) / count, keras.ops.max(x, axis=1)]

    def _numbers(self, name: str, x: Any, shape: tuple[int, ...]) -> list[Any]:
        flatten = keras.layers.Flatten(name=layer_name(name, "flat")) if shape else None
        given = flatten(x) if flatten else keras.ops.expand_dims(x, -1)
        x = self.spec.normalization(name)(given)
        if "float" not in given.dtype:
            return [x]
        missing = keras.ops.isnan(x)
        found = [keras.ops.where(missing, 0.0, x)]
        if self.spec.statistics(name).missing:
            found.append(keras.ops.cast(missing, x.dtype))
        return found


class _Cut:
    """A numeric input, whose range is cut into pieces at quantiles of the training examples."""

    def __init__(self, spec: InputSpec, name: str, most: int) -> None:
        # Before the dataset is prepared, assume the range of the artificial examples of a dry run.
        quantiles = np.array(spec.statistics(name).quantiles or (-1.0, 0.0, 1.0))
        edges = np.unique(quantiles)
        if len(edges) > most + 1:
            edges = np.unique(quantiles[np.linspace(0, len(quantiles) - 1, most + 1).astype(int)])
        low, middle, high = np.quantile(quantiles, (0.25, 0.5, 0.75))
        spread = (high - low) or (edges[-1] - edges[0]) / 2 or 1.0
        self._most = most
        self._edges = (edges - middle) / spread
        self.ends = self._edges[[0, -1]].astype(np.float32)
        # Scale by the interquartile range. With a scale that depends on outliers, other numbers
        # could become equal in float32.
        self.layer = Normalization(
            float(middle), float(spread), dtype="float32", name=layer_name(name, "normalization")
        )

    def pieces(self) -> tuple[Any, Any]:
        """Return the start of each piece, and the inverse of its length."""
        begins, steps = np.zeros((2, self._most), np.float32)
        count = len(self._edges) - 1
        begins[:count] = self._edges[:-1]
        steps[:count] = 1 / np.diff(self._edges)
        return begins, steps


# Minimum number of training examples in which a term or string must occur to be known.
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
        return _mean(layer(x), embedding(name, layer.size, dimension))
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
    rows = embedding(name, size + pairs.size, dimension)(numbers)
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


def embedding(name: str, rows: int, dimension: int) -> ShardedEmbedding:
    """Return the embedding of an input. Ids beyond the training data wrap around, without error."""
    return ShardedEmbedding(
        rows, dimension, shards=1, unknown="wrap", name=layer_name(name, "embedding")
    )


def _mean(numbers: Any, layer: ShardedEmbedding) -> Any:
    """Return the mean embedding row of the words, for older datasets, which store no pairs."""
    rows = layer(numbers)
    there = keras.ops.expand_dims(keras.ops.cast(keras.ops.not_equal(numbers, 0), rows.dtype), -1)
    count = keras.ops.maximum(keras.ops.sum(there, axis=1), 1)
    return keras.ops.sum(rows * there, axis=1) / count


def sequence(  # noqa: PLR0913
    spec: InputSpec,
    *,
    hidden_units: Sequence[int] = (64,),
    dimension: int = 48,
    blocks: int = 6,
    words: int = 200,
    dropout: float = 0.2,
) -> keras.Model:
    """Return a model for sequences of numbers, vectors, ids or strings of any length.

    A position of a sequence is encoded by the embedding row of its id or string, its numbers, and
    its relative index. Residual convolutions combine neighboring positions. Each block has half as
    many positions as the previous one, so its receptive field doubles (Johnson and Zhang 2017,
    "Deep Pyramid Convolutional Neural Networks for Text Categorization"; pre-normalization as in
    Xiong et al. 2020). A sequence is represented by the maximum of each block over the positions,
    the mean of the first layer over the positions, and the logarithm of its length. Other inputs
    are encoded as in `tabular`. Padding is ignored.

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
            units, _BLOCK_WIDTH, padding="same", activation="relu",
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
