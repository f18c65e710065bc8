"""Reads random rows of a split, and converts them to matrices of numbers, categories and text.

As in `flotilla.trainer.models.tabular`, a string feature whose values repeat in the training rows
is a category. Otherwise it is text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from scipy import sparse

from flotilla.trainer import storage
from flotilla.trainer.data import blocks
from flotilla.trainer.data.read import complete_features, read_rows
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import are_repeated
from flotilla.trainer.tasks.base import Array, Floats

SPLIT = "train"
#: Maximum length of a text in bytes. Longer texts are truncated.
TEXT_BYTES = 2000
# Maximum sizes of the fetched shards, and of the records drawn from them, in bytes.
_MOST_BYTES, _MOST_READ = 256 << 20, 128 << 20
# Number of records to fetch for each drawn record.
_SLACK = 4
_AT_ONCE, _BYTES_AT_ONCE = 4096, 32 << 20


class NoBaselineError(Exception):
    """A baseline cannot be fitted or used. The message is the reason."""


class Clock:
    """A countdown of the time that is left for the baselines."""

    def __init__(self, seconds: float) -> None:
        """Start a countdown of `seconds`."""
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The remaining seconds, or a negative number after the end."""
        return self._end - time.monotonic()

    def share(self, of: float) -> Clock:
        """Return a clock that ends after the fraction `of` of the remaining time."""
        return Clock(self.left * of)

    def check(self) -> None:
        """Raise `NoBaselineError` if no time is left."""
        if self.left <= 0:
            raise NoBaselineError("the time limit was reached")


@dataclass(frozen=True)
class Rows:
    """Some examples: features keyed by name, the task's labels, and weights [n]."""

    columns: Mapping[str, Array]
    labels: Any
    weights: Floats

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.weights)

    def select(self, places: Any) -> Rows:
        """Return the rows that a slice or a mask selects."""
        values = dict(self.columns), self.labels, self.weights
        return Rows(*tf.nest.map_structure(lambda each: each[places], values))

    def first(self, most: int) -> Rows:
        """Return the first `most` rows, or all rows if there are fewer."""
        return self if self.count <= most else self.select(slice(most))


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The shards of a dataset, and a local folder to download them to."""

    spec: DatasetSpec
    uri: str
    scratch: Path


def training_rows(splits: Splits, names: Sequence[str], most: int, clock: Clock) -> Rows:
    """Return up to `most` training examples, drawn uniformly. Examples of weight 0 are dropped.

    Only the first shards are read, because they are a random sample of all examples.

    Raises:
        NoBaselineError: the first shard is too large, all weights are 0, or time ran out.
    """
    spec, manifest = splits.spec, storage.read_manifest(splits.uri)
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    files, examples, size = list[str](), 0, 0
    for name, count in zip(spec.files(SPLIT), spec.shards[SPLIT], strict=True):
        if examples >= _SLACK * most or size + sizes[name] > _MOST_BYTES:
            break
        files.append(name)
        examples, size = examples + count, size + sizes[name]
    if not examples:
        raise NoBaselineError(f"the first training shard exceeds {_MOST_BYTES >> 20} MiB")
    folder = splits.scratch / SPLIT
    storage.fetch(splits.uri, folder, only=set(files).__contains__, manifest=manifest)
    most = min(most, _MOST_READ * examples // size)
    drawn = np.zeros(examples, np.bool_)
    chosen = np.random.default_rng(0).choice(examples, min(most, examples), replace=False)
    drawn[chosen] = True
    parts = []
    for rows in batches(spec, [folder / name for name in files], names, drawn):
        clock.check()
        parts.append(rows.select(rows.weights > 0))
    values = ((dict(part.columns), part.labels, part.weights) for part in parts)
    found = Rows(*tf.nest.map_structure(lambda *each: np.concatenate(each), *values))
    if not found.count:
        raise NoBaselineError("the weights of all training examples are 0")
    return found


def batches(
    spec: DatasetSpec, files: Sequence[Path], names: Sequence[str], drawn: Array
) -> Iterator[Rows]:
    """Yield batches of the rows that the mask `drawn` selects, with the features in `names`."""
    roles = [*dict.fromkeys(filter(None, [*names, *spec.targets, spec.weight]))]
    marks = tf.constant(drawn)

    def draw(rows: blocks.Rows, before: tf.Tensor) -> blocks.Rows:
        mine = marks[before : before + blocks.count_rows(rows)]
        return blocks.gather_rows(rows, tf.where(mine)[:, 0])

    read = blocks.number_windows(read_rows(spec, files, roles)).map(draw)
    size = sum(path.stat().st_size for path in files) // len(drawn)
    at_once = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // max(size, 1)))

    def complete(rows: blocks.Rows) -> dict[str, tf.Tensor]:
        found = complete_features(spec, roles, rows)
        return {
            name: tf.strings.substr(each, 0, TEXT_BYTES) if each.dtype == tf.string else each
            for name, each in found.items()
        }

    for values in read.rebatch(at_once).map(complete).as_numpy_iterator():
        labels = {name: values[name] for name in spec.targets}
        count = len(next(iter(labels.values())))
        weights = values[spec.weight] if spec.weight else np.ones(count)
        yield Rows(
            columns={name: values[name] for name in names},
            labels=labels if len(labels) > 1 else labels[spec.targets[0]],
            weights=weights.astype(np.float64).reshape(count),
        )


# Maximum size of a tensor of rank 2 or more. Larger tensors may be images, and are ignored.
_MOST_PIXELS = 256
# Above this number of columns, histograms have 63 bins instead of 255, which limits their memory.
_FEW_COLUMNS = 500
# For a linear model, numbers are clipped to this many standard deviations from the mean.
_FAR = 10.0
#: Maximum number of rows that a linear model of text is fitted to.
MOST_TEXTS = 20_000
_TEXTS_AT_ONCE = 500
# A word is one letter of a script without spaces, or a sequence of other letters and digits.
_ALONE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = rf"[{_ALONE}]|[^\W{_ALONE}]+"
Matrix = Any


def usable(spec: DatasetSpec) -> list[str]:
    """Return the inputs that are numbers, classes or text. Images and sequences are excluded."""
    return [name for name in spec.inputs if _is_column(spec.features[name])]


def width(spec: DatasetSpec, names: Sequence[str]) -> int:
    """Return the total number of columns of the features."""
    return sum(math.prod(spec.features[name].sizes) for name in names)


def _is_column(feature: FeatureSpec) -> bool:
    if feature.varies or feature.stored == "image":
        return False
    if feature.dtype == "string":
        return not feature.sizes
    return len(feature.sizes) <= 1 or math.prod(feature.sizes) <= _MOST_PIXELS


def _code(values: Array, column: Array) -> Floats:
    """Return the index in the sorted `values` of each element of `column`, or NaN if unknown."""
    places = np.searchsorted(values, column).clip(max=len(values) - 1)
    return np.where(values[places] == column, places.astype(np.float64), np.nan)


class Columns:
    """Converts rows to a matrix, based on statistics of the training rows."""

    def __init__(self, spec: DatasetSpec, rows: Rows, classes: int) -> None:
        """Determine the kind of each feature for a model with `classes` classes."""
        self.is_narrow = width(spec, [*rows.columns]) <= _FEW_COLUMNS
        self.bins = 255 if self.is_narrow else 63
        self._classes = classes
        # The most frequent values of each category feature, sorted by value.
        self._categories: dict[str, Array] = {}
        self.texts: list[str] = []
        self._numbers: list[str] = []
        for name, column in rows.columns.items():
            feature = spec.features[name]
            is_text = feature.dtype == "string"
            if not is_text and (feature.shape or not feature.num_classes):
                self._numbers.append(name)
                continue
            values, counts = np.unique(column, return_counts=True)
            if is_text and not are_repeated(len(values), rows.count):
                self.texts.append(name)
            else:
                kept = np.argsort(-counts, kind="stable")[: self.bins - 1]
                self._categories[name] = values[np.sort(kept)]

    @property
    def plain(self) -> bool:
        """Whether any feature is a number or a category."""
        return bool(self._numbers or self._categories)

    def learn_trees(self, rows: Rows, clock: Clock) -> Matrix:
        """Choose the histogram bins of the numbers, and return the matrix of the rows."""
        numbers = self._all_numbers(rows)
        steps = np.linspace(0, 1, self.bins)[1:-1]
        known = (column[~np.isnan(column)] for column in numbers.T)
        # Compute the bins here, because scikit-learn's weighted quantiles would take a minute.
        self._steps = [
            np.unique(np.quantile(each, steps, method="lower")) if len(each) else None
            for each in known
        ]
        return self.trees(rows, clock)

    def trees(self, rows: Rows, clock: Clock) -> Matrix:
        """Return the matrix [n, columns] of binned numbers (NaN if missing) and categories."""
        clock.check()
        numbers = self._all_numbers(rows).T
        found = [
            np.where(np.isnan(column), np.nan, np.searchsorted(steps, column))
            for steps, column in zip(self._steps, numbers, strict=True)
            # Skip columns that had no value in training.
            if steps is not None
        ]
        codes = [_code(values, rows.columns[name]) for name, values in self._categories.items()]
        return np.column_stack([np.zeros(rows.count), *found, *codes])

    def are_categories(self, columns: int) -> Array:
        """Return a mask of the category columns. They come last in the matrix of `trees`."""
        return np.arange(columns) >= columns - len(self._categories)

    def _all_numbers(self, rows: Rows) -> Floats:
        flat = [rows.columns[name].reshape(rows.count, -1) for name in self._numbers]
        if not flat:
            return np.empty((rows.count, 0))
        whole = np.concatenate(flat, axis=1).astype(np.float64)
        whole[~np.isfinite(whole)] = np.nan
        return whole

    def learn_linear(self, rows: Rows, clock: Clock) -> Matrix:
        """Fit scales and word weights. Return the matrix of as many rows as the time allows."""
        rows = rows.first(MOST_TEXTS) if self.texts else rows
        numbers = self._all_numbers(rows)
        # Divide by the maximum first, because squares of very large numbers would overflow.
        self._largest = _or_one(np.nanmax(np.abs(numbers), axis=0, initial=0.0))
        scaled = numbers / self._largest
        self._has_gaps = np.isnan(scaled).any(axis=0)
        self._means = np.nan_to_num(np.nanmean(scaled, axis=0))
        self._stds = _or_one(np.nanstd(scaled, axis=0))
        from sklearn.feature_extraction.text import TfidfTransformer  # noqa: PLC0415

        counts, taken = self._count_words(rows, clock.share(1 / 2))
        self._weights = [TfidfTransformer(sublinear_tf=True).fit(each) for each in counts]
        return self._join(rows.first(taken), counts)

    def linear(self, rows: Rows, clock: Clock) -> Matrix:
        """Return the matrix of new rows. Raises `NoBaselineError` if time runs out."""
        counts, taken = self._count_words(rows, clock)
        if taken < rows.count:
            clock.check()
        return self._join(rows, counts)

    def _join(self, rows: Rows, counts: Sequence[Matrix]) -> Matrix:
        scaled = (self._all_numbers(rows) / self._largest - self._means) / self._stds
        gaps = np.isnan(scaled[:, self._has_gaps]).astype(np.float64)
        dense = np.hstack([np.nan_to_num(scaled).clip(-_FAR, _FAR), gaps])
        codes = (
            _one_hot(_code(values, rows.columns[name]), len(values))
            for name, values in self._categories.items()
        )
        weighed = (each.transform(count) for each, count in zip(self._weights, counts, strict=True))
        others = [*codes, *weighed]
        return sparse.hstack([sparse.csr_matrix(dense), *others], format="csr") if others else dense

    def _count_words(self, rows: Rows, clock: Clock) -> tuple[list[Matrix], int]:
        """Count hashed words and word pairs of as many rows as the time allows."""
        if not self.texts:
            return [], rows.count
        from sklearn.feature_extraction.text import HashingVectorizer  # noqa: PLC0415

        # Limit a text feature to 2^20 coefficients (8 MB), because a solver keeps 20 copies.
        size = 1 << min(17, ((1 << 20) // max(self._classes, 1)).bit_length() - 1)
        words = HashingVectorizer(
            n_features=size, token_pattern=_WORD, ngram_range=(1, 2), alternate_sign=False,
            norm=None, decode_error="replace",
        )  # fmt: skip
        found: list[list[Matrix]] = [[] for _ in self.texts]
        taken = 0
        while taken < rows.count and (clock.left > 0 or not taken):
            part = slice(taken, taken + _TEXTS_AT_ONCE)
            for each, name in zip(found, self.texts, strict=True):
                each.append(words.transform(rows.columns[name][part]))
            taken = min(part.stop, rows.count)
        return [sparse.vstack(each, format="csr") for each in found], taken


def _or_one(values: Floats) -> Floats:
    return np.where((values > 0) & np.isfinite(values), values, 1.0)


def _one_hot(codes: Floats, count: int) -> Matrix:
    known = np.flatnonzero(~np.isnan(codes))
    cells = known, codes[known].astype(np.int64)
    return sparse.csr_matrix((np.ones(len(known)), cells), shape=(len(codes), count))
