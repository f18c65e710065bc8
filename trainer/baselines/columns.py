"""Features of examples as the columns of a matrix: numbers, categories and text.

As in `flotilla.trainer.models.tabular`, a string feature whose values repeat in the training rows
is a category. Otherwise it is text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import sparse

from flotilla.trainer.baselines.rows import Clock, Rows
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import are_repeated
from flotilla.trainer.tasks.base import Array, Floats

# Maximum size of a tensor of rank 2 or more. Larger tensors may be images, and are ignored.
_MOST_PIXELS = 256
_VECTOR = 1
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


def _is_text(feature: FeatureSpec) -> bool:
    return feature.dtype == "string"


def _is_column(feature: FeatureSpec) -> bool:
    if feature.varies or feature.stored == "image":
        return False
    shape = feature.sizes
    return len(shape) <= (0 if _is_text(feature) else _VECTOR) or (
        not _is_text(feature) and math.prod(shape) <= _MOST_PIXELS
    )


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
            if not _is_text(feature) and (feature.shape or not feature.num_classes):
                self._numbers.append(name)
                continue
            values, counts = np.unique(column, return_counts=True)
            if _is_text(feature) and not are_repeated(len(values), rows.count):
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
        # Compute the bins here, because scikit-learn's weighted quantiles would take a minute.
        self._steps = [
            np.unique(np.quantile(known, steps, method="lower")) if len(known) else None
            for known in (column[~np.isnan(column)] for column in numbers.T)
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
        counts, taken = self._count_words(rows.columns, rows.count, clock.share(1 / 2))
        self._weights = []
        for each in counts:
            from sklearn.feature_extraction.text import TfidfTransformer  # noqa: PLC0415

            self._weights.append(TfidfTransformer(sublinear_tf=True).fit(each))
        return self._together(self._plain(rows.first(taken)), counts)

    def linear(self, rows: Rows, clock: Clock) -> Matrix:
        """Return the matrix of new rows. Raises `NoBaselineError` if time runs out."""
        counts, taken = self._count_words(rows.columns, rows.count, clock)
        if taken < rows.count:
            clock.check()
        return self._together(self._plain(rows), counts)

    def _together(self, plain: Matrix, counts: Sequence[Matrix]) -> Matrix:
        weighed = [each.transform(count) for each, count in zip(self._weights, counts, strict=True)]
        if not weighed:
            return plain
        return sparse.hstack([sparse.csr_matrix(plain), *weighed], format="csr")

    def _plain(self, rows: Rows) -> Matrix:
        scaled = (self._all_numbers(rows) / self._largest - self._means) / self._stds
        gaps = np.isnan(scaled[:, self._has_gaps]).astype(np.float64)
        dense = np.hstack([np.nan_to_num(scaled).clip(-_FAR, _FAR), gaps])
        codes = [
            _one_hot(_code(values, rows.columns[name]), len(values))
            for name, values in self._categories.items()
        ]
        return sparse.hstack([sparse.csr_matrix(dense), *codes], format="csr") if codes else dense

    def _count_words(
        self, columns: Mapping[str, Array], rows: int, clock: Clock
    ) -> tuple[list[Matrix], int]:
        """Count hashed words and word pairs of as many rows as the time allows."""
        if not self.texts:
            return [], rows
        from sklearn.feature_extraction.text import HashingVectorizer  # noqa: PLC0415

        # Limit a text feature to 2^20 coefficients (8 MB), because a solver keeps 20 copies.
        size = 1 << min(17, ((1 << 20) // max(self._classes, 1)).bit_length() - 1)
        words = HashingVectorizer(
            n_features=size, token_pattern=_WORD, ngram_range=(1, 2), alternate_sign=False,
            norm=None, decode_error="replace",
        )  # fmt: skip
        found: list[list[Matrix]] = [[] for _ in self.texts]
        taken = 0
        while taken < rows and (clock.left > 0 or not taken):
            part = slice(taken, taken + _TEXTS_AT_ONCE)
            for each, name in zip(found, self.texts, strict=True):
                each.append(words.transform(columns[name][part]))
            taken = min(part.stop, rows)
        return [sparse.vstack(each, format="csr") for each in found], taken


def _or_one(values: Floats) -> Floats:
    return np.where((values > 0) & np.isfinite(values), values, 1.0)


def _one_hot(codes: Floats, count: int) -> Matrix:
    known = np.flatnonzero(~np.isnan(codes))
    cells = known, codes[known].astype(np.int64)
    return sparse.csr_matrix((np.ones(len(known)), cells), shape=(len(codes), count))
