"""A network for the columns of a table: numbers, classes, texts and sequences.

A number is encoded by its position between the quantiles of the training examples, and a separate
layer for each number maps the encoding to several units (piecewise linear encoding: Gorishniy et
al. 2022, "On Embeddings for Numerical Features in Tabular Deep Learning"). As in a decision tree,
the effect of a number need not be monotonic, and outliers have a limited effect. Missing numbers
are marked. Classes and repeated strings have embedding rows. Other strings are bags of words
(`models/text.py`), which also bypass the hidden layers. A sequence of numbers passes through
convolutions, with mean and maximum pooling over its positions. Padding is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.features.names import length_name
from flotilla.trainer.features.statistics.statistics import NUMBER, are_repeated
from flotilla.trainer.models.classifiers import hidden, outputs
from flotilla.trainer.models.normalization import Normalization
from flotilla.trainer.models.spec import InputSpec, layer_name, size
from flotilla.trainer.models.text import text_features
from flotilla.trainer.runtime.errors import ConfigError

# Rank of a sequence of vectors (length and size), number of convolution layers, and kernel size.
_VECTORS, _CONVOLUTIONS, _WIDTH = 2, 2, 5
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


class Places:
    """Encodes each input as arrays [n, units]."""

    def __init__(
        self,
        spec: InputSpec,
        given: Mapping[str, Any],
        dimension: int,
        words: int,
        of_sequence: OfSequence | None,
    ) -> None:
        """Store the inputs of a model, keyed by name."""
        self.spec = spec
        self.given = given
        self._dimension = dimension
        self._words = words
        self._of_sequence = of_sequence
        #: Bags of words that are also passed directly to the outputs.
        self.bags: list[Any] = []

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
            return [self._rows(name, x, self.spec.classes[name])]
        return self._numbers(name, x, shape)

    def numbers(self) -> list[str]:
        """Return the names of inputs that are single numbers."""
        plain = [name for name in self.given if name not in self.spec.classes]
        return [name for name in plain if self._is_number(self.given[name])]

    def _is_number(self, x: Any) -> bool:
        return x.dtype != "string" and not x.shape[1:]

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
        # Limit the numbers to the range of training, because infinity times zero would be NaN.
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
        gaps = [at for at, name in enumerate(names) if self.spec.statistics(name).missing]
        if gaps:
            marks = keras.ops.take(keras.ops.cast(missing, x.dtype), gaps, axis=1)
            found.append(marks)
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
            return [self._rows(name, layer(x), layer.size)]
        bag = text_features(self.spec, name, x, dimension=self._dimension, words=self._words)
        if known.pairs:
            self.bags.append(bag)
        return [bag]

    def _rows(self, name: str, numbers: Any, rows: int) -> Any:
        # With "wrap", a class that was not in the training data causes no error in serving.
        layer = ShardedEmbedding(
            rows, self._dimension, shards=1, unknown="wrap", name=layer_name(name, "embedding")
        )
        return layer(numbers)

    def _sequence(self, name: str, x: Any, shape: tuple[int | None, ...]) -> list[Any]:
        if x.dtype == "string" or len(shape) > _VECTORS:
            raise ConfigError(
                f"{name!r} must be a sequence of numbers or vectors, not {x.dtype} of shape "
                f"{shape}; use `sequence`, or write your own model"
            )
        length = self.given.get(length_name(name))
        known = KnownPlaces(name=layer_name(name, "places"))([x] if length is None else [x, length])
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
        if shape:
            x = keras.layers.Flatten(name=layer_name(name, "flat"))(x)
        else:
            x = keras.ops.expand_dims(x, -1)
        is_float = "float" in x.dtype
        x = self.spec.normalization(name)(x)
        if not is_float:
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
