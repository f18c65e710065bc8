"""Metrics of labels and predictions.

A validation uses Keras metrics, whose states are sums in single precision. Labels and predictions
are first reshaped to [n, numbers], because Keras is inconsistent in how it broadcasts weights [n]
to labels with more axes. Some of the metrics do not exist in Keras.

The metrics of an evaluation are in `flotilla.trainer.tasks.tallies`. This module provides their
counts per class, and curves that are thinned for plots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer.tasks.base import Tested

TOP = 3
TOP_NAME = f"top_{TOP}_accuracy"
BINS = 15
CURVE_POINTS = 100
#: Metrics of a classifier that are averages over its classes.
AVERAGES = tuple(
    f"{average}_{name}"
    for average in ("macro", "weighted")
    for name in ("precision", "recall", "f1")
)
_BINARY = 2
_TINY = 1e-12

Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.int64]
Counts = npt.NDArray[Any]
Area = dict[str, float | None]
NO_AREA: Area = {"auc": None, "average_precision": None}


def rows(values: Any) -> tf.Tensor:
    """Reshape values to one row per example, [n, numbers]."""
    return tf.reshape(values, [tf.shape(values)[0], math.prod(values.shape[1:])])


class _RowMetric:
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        update = super().update_state  # type: ignore[misc]
        return update(rows(y_true), rows(y_pred), sample_weight=sample_weight)


def _reshape_to_rows(metric: type[keras.Metric]) -> type[keras.Metric]:
    return type(metric.__name__, (_RowMetric, metric), {})


MeanAbsoluteError = _reshape_to_rows(keras.metrics.MeanAbsoluteError)
MeanSquaredError = _reshape_to_rows(keras.metrics.MeanSquaredError)
RootMeanSquaredError = _reshape_to_rows(keras.metrics.RootMeanSquaredError)
BinaryAccuracy = _reshape_to_rows(keras.metrics.BinaryAccuracy)
BinaryCrossentropy = _reshape_to_rows(keras.metrics.BinaryCrossentropy)
Precision = _reshape_to_rows(keras.metrics.Precision)
Recall = _reshape_to_rows(keras.metrics.Recall)


class F1(_RowMetric, keras.metrics.F1Score):
    """Keras's F1 score at a probability threshold."""

    def __init__(self, name: str, average: str = "micro", threshold: float = 0.5) -> None:
        """Create the metric. The average `micro` counts all classes together."""
        super().__init__(average=average, threshold=threshold, name=name)


class SubsetAccuracy(keras.metrics.MeanMetricWrapper):
    """The fraction of examples whose labels are all predicted correctly (threshold 0.5)."""

    def __init__(self) -> None:
        """Create the metric."""
        super().__init__(_all_right, name="subset_accuracy")


def _all_right(true: Any, predicted: Any) -> tf.Tensor:
    right = (rows(predicted) > 0.5) == (rows(tf.cast(true, tf.float32)) > 0.5)  # noqa: PLR2004
    return tf.cast(tf.reduce_all(right, axis=1), tf.float32)


class MacroF1(keras.Metric):
    """The mean F1 over all classes that occur in the labels or predictions.

    Labels are class numbers. An example may have several positions. Positions with a label below 0
    are ignored.
    """

    def __init__(self, classes: int, name: str = "macro_f1") -> None:
        """Create the metric for this number of classes."""
        super().__init__(name=name)
        self._classes = classes
        self.right, self.either = (
            self.add_weight((classes,), "zeros", name=each) for each in ("right", "either")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        guess = tf.argmax(y_pred, axis=-1, output_type=tf.int32)
        guess = tf.reshape(guess, [tf.shape(guess)[0], -1])
        labels = tf.reshape(tf.cast(y_true, tf.int32), tf.shape(guess))
        known = tf.cast(labels >= 0, self.dtype)
        weight = known * _column(known, sample_weight)
        self.right.assign_add(
            self._sum_by_class(labels, weight * tf.cast(labels == guess, self.dtype))
        )
        self.either.assign_add(
            self._sum_by_class(labels, weight) + self._sum_by_class(guess, weight)
        )

    def _sum_by_class(self, classes: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        flat = (tf.reshape(each, [-1]) for each in (values, tf.maximum(classes, 0)))
        return tf.math.unsorted_segment_sum(*flat, self._classes)

    def result(self) -> Any:
        """Return the mean F1."""
        right, either = map(tf.convert_to_tensor, (self.right, self.either))
        each = tf.boolean_mask(2 * tf.math.divide_no_nan(right, either), either > 0)
        return tf.reduce_mean(each)


class R2Score(keras.Metric):
    """The coefficient of determination, averaged over the numbers of an example.

    Keras sums the squares of the labels. The sum loses precision if their mean is far above their
    standard deviation. Here, a value near the mean is subtracted from the labels first.
    """

    def __init__(self, numbers: int, near: float) -> None:
        """Create the metric. An example has `numbers` labels, and their mean is about `near`."""
        super().__init__(name="r2_score")
        self._near = near
        self.weight = self.add_weight(name="weight", initializer="zeros")
        self.total, self.squares, self.residual = (
            self.add_weight(name=name, shape=(numbers,), initializer="zeros")
            for name in ("total", "squares", "residual")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        true, predicted = (tf.cast(rows(each), self.dtype) for each in (y_true, y_pred))
        weight = _column(true, sample_weight)
        centred = true - self._near
        self.weight.assign_add(tf.reduce_sum(weight))
        self.total.assign_add(tf.reduce_sum(weight * centred, axis=0))
        self.squares.assign_add(tf.reduce_sum(weight * centred**2, axis=0))
        self.residual.assign_add(tf.reduce_sum(weight * (true - predicted) ** 2, axis=0))

    def result(self) -> tf.Tensor:
        """Return the score. If all labels are equal, it is 1 for exact predictions, else 0."""
        weight, total, squares, residual = map(
            tf.convert_to_tensor, (self.weight, self.total, self.squares, self.residual)
        )
        variance = squares - tf.math.divide_no_nan(total**2, weight)
        constant = tf.cast(residual <= 0, self.dtype)
        explained = 1 - tf.math.divide_no_nan(residual, variance)
        return tf.reduce_mean(tf.where(variance > 0, explained, constant))


class CalibrationError(keras.Metric):
    """Expected calibration error: the mean of |probability - fraction of true labels|.

    The mean is over bins of equal width, weighted by the examples in them (Guo et al. 2017).
    """

    def __init__(self) -> None:
        """Create the metric."""
        super().__init__(name="calibration_error")
        self.weight, self.sure, self.true = (
            self.add_weight((BINS,), "zeros", self.dtype, name=name)
            for name in ("weight", "sure", "true")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        true, sure = (tf.cast(rows(each), self.dtype) for each in (y_true, y_pred))
        weight = tf.broadcast_to(_column(true, sample_weight), tf.shape(true))
        place = tf.minimum(tf.cast(sure * BINS, tf.int32), BINS - 1)
        for variable, values in (
            (self.weight, weight),
            (self.sure, weight * sure),
            (self.true, weight * true),
        ):
            flat = (tf.reshape(each, [-1]) for each in (values, place))
            variable.assign_add(tf.math.unsorted_segment_sum(*flat, BINS))

    def result(self) -> tf.Tensor:
        """Return the calibration error."""
        weight, sure, true = map(tf.convert_to_tensor, (self.weight, self.sure, self.true))
        return tf.math.divide_no_nan(tf.reduce_sum(tf.abs(sure - true)), tf.reduce_sum(weight))


class Areas(keras.Metric):
    """Area under the ROC curve (`auc`) and `average_precision`, averaged over the columns.

    Both are computed from histograms of the logits of true and false labels. Bins of equal width in
    the logit distinguish small probabilities, unlike Keras's bins of equal width in the
    probability. Scores in the same bin count as tied. With up to 16 columns, there are 4096 bins of
    width 0.006. With more columns there are fewer. `flotilla.trainer.tasks.areas` is exact. A
    column whose labels are all equal has no area. If no column has an area, both metrics are NaN.
    """

    def __init__(self, numbers: int = 1, largest: float = 12, prefix: str = "") -> None:
        """Create the metric for `numbers` columns of probabilities.

        `largest` is the absolute logit at which the bins end. `prefix`, such as `macro_`, precedes
        the names of the metrics.
        """
        super().__init__(name="areas")
        self._prefix, self._numbers, self._largest = prefix, numbers, largest
        self._steps = steps = min(max((1 << 16) // numbers, 400), 4096)
        self.true, self.false = (
            self.add_weight((numbers, steps), "zeros", self.dtype, name=name)
            for name in ("true", "false")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        true, sure = (tf.cast(rows(each), self.dtype) for each in (y_true, y_pred))
        weight = tf.broadcast_to(_column(true, sample_weight), tf.shape(true))
        logit = tf.math.log(sure) - tf.math.log1p(-sure)
        share = tf.clip_by_value(logit / (2 * self._largest) + 0.5, 0, 1)
        step = tf.minimum(tf.cast(share * self._steps, tf.int32), self._steps - 1)
        place = tf.reshape(step + self._steps * tf.range(self._numbers), [-1])
        for variable, kind in ((self.true, true), (self.false, 1 - true)):
            flat = tf.reshape(weight * kind, [-1])
            count = tf.math.unsorted_segment_sum(flat, place, self._numbers * self._steps)
            variable.assign_add(tf.reshape(count, variable.shape))

    def result(self) -> dict[str, tf.Tensor]:
        """Return both metrics."""
        true, false = map(tf.convert_to_tensor, (self.true, self.false))
        hits, misses = (tf.cumsum(each, axis=1, reverse=True) for each in (true, false))
        all_true, all_false = hits[:, 0], misses[:, 0]
        # Scores in a bin are tied, so half of the bin's true labels count as ranked above.
        above = tf.reduce_sum(false * (hits - true / 2), axis=1)
        precise = tf.reduce_sum(true * tf.math.divide_no_nan(hits, hits + misses), axis=1)
        both = (all_true > 0) & (all_false > 0)
        areas = {"auc": above / (all_true * all_false), "average_precision": precise / all_true}
        return {
            f"{self._prefix}{name}": tf.reduce_mean(tf.boolean_mask(values, both))
            for name, values in areas.items()
        }


def _column(values: tf.Tensor, weights: Any) -> tf.Tensor:
    given = tf.ones_like(values[:, 0]) if weights is None else weights
    return tf.cast(given, values.dtype)[:, tf.newaxis]


def _scores() -> Any:
    # Import scikit-learn only here, because the import takes half a second and loads pandas.
    from sklearn import metrics  # noqa: PLC0415

    return metrics


def log_softmax(logits: Floats) -> Floats:
    """Return the log-probabilities of logits [n, classes] in float64.

    The logarithms of probabilities near 1 are precise, and the result does not depend on the order
    of the classes.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    np.put_along_axis(powers, logits.argmax(axis=1)[:, np.newaxis], 0, axis=1)
    powers.sort(axis=1)
    result: Floats = shifted - np.log1p(powers.sum(axis=1, keepdims=True))
    return result


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of logits [n, classes]."""
    return np.exp(log_softmax(logits)).astype(np.float32)


def losses(labels: Labels, logits: Floats) -> Floats:
    """Return the cross entropy of each example [n] from logits [n, classes], in nats."""
    result: Floats = -log_softmax(logits)[np.arange(len(labels)), labels]
    return result


def is_in_top(labels: Labels, logits: Floats) -> npt.NDArray[np.bool_]:
    """Return whether the class of each example is among the `TOP` most likely classes."""
    own = logits[np.arange(len(labels)), labels][:, np.newaxis]
    # As in scikit-learn, of two classes with equal logits the later one ranks first.
    later = np.arange(logits.shape[1]) > labels[:, np.newaxis]
    ahead = (logits > own) | ((logits == own) & later)
    result: npt.NDArray[np.bool_] = ahead.sum(axis=1) < TOP
    return result


def confusion(labels: Labels, guess: Labels, classes: int, weights: Any = None) -> Counts:
    """Return the confusion matrix, with a row per label and a column per prediction."""
    return np.bincount(labels * classes + guess, weights, classes**2).reshape(classes, classes)


def count_by_class(cells: Counts) -> tuple[Counts, Counts, Counts]:
    """Return three counts per class: correct predictions, labels, and predictions."""
    return cells.diagonal(), cells.sum(axis=1), cells.sum(axis=0)


def per_class(
    counts: tuple[Counts, Counts, Counts], areas: Sequence[Area], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the metrics of each class. Precision, recall and F1 are 0 if they are undefined."""
    hits, support, predicted = counts
    return [
        {
            "label": name,
            "precision": float(hits[at] / max(predicted[at], _TINY)),
            "recall": float(hits[at] / max(support[at], _TINY)),
            "f1": float(2 * hits[at] / max(support[at] + predicted[at], _TINY)),
            "support": plain(support[at]),
            **areas[at],
        }
        for at, name in enumerate(names)
    ]


def plain(count: float) -> float | int:
    """Return a count as an int, or as a float if weights make it fractional."""
    return int(count) if float(count).is_integer() else float(count)


def plain_rows(counts: Counts) -> list[list[float | int]]:
    """Return rows of counts as lists of plain numbers."""
    return [[plain(each) for each in row] for row in counts]


def curves(labels: Labels, logits: Floats, names: list[str]) -> list[dict[str, Any]]:
    """Return the ROC curve and the precision-recall curve of each class.

    Classes to which all examples or no examples belong are left out.
    """
    found, probabilities = [], softmax(logits)
    for index, name in enumerate(names):
        own, score = labels == index, probabilities[:, index]
        if not 0 < own.sum() < len(own):
            continue
        false, true, _ = _scores().roc_curve(own, score)
        precision, recall, _ = _scores().precision_recall_curve(own, score)
        found.append({"label": name, "roc": _thin(false, true), "pr": _thin(recall, precision)})
    return found


def roc(labels: Labels, logits: Floats) -> list[list[float]]:
    """Return a ROC curve: per point, the false positive rate, true positive rate and threshold.

    For two classes, this is the curve of the second class. For more classes, it is micro-averaged:
    each pair of an example and a class is a binary decision. The result is empty if all examples
    are of the same class.
    """
    probabilities, classes = softmax(logits), logits.shape[1]
    if classes <= _BINARY:
        own, score = labels == classes - 1, probabilities[:, -1]
    else:
        own = (labels[:, np.newaxis] == np.arange(classes)).ravel()
        score = probabilities.ravel()
    if not 0 < own.sum() < len(own):
        return []
    false, true, thresholds = _scores().roc_curve(own, score)
    # The first threshold is infinite. Clip it, because JSON cannot represent infinity.
    return _thin(false, true, thresholds.clip(0, 1))


def _thin(x: Floats, y: Floats, *more: Floats) -> list[list[float]]:
    """Return up to `CURVE_POINTS` points of a curve, evenly spaced if the curve has more."""
    kept = np.arange(len(x))
    if len(x) > CURVE_POINTS:
        way = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
        wanted = np.linspace(0, way[-1], CURVE_POINTS)
        kept = np.unique(np.searchsorted(way, wanted).clip(0, len(x) - 1))
    points = zip(*(each[kept] for each in (x, y, *more)), strict=True)
    return [[round(float(value), 5) for value in point] for point in points]


def averages(hits: Counts, support: Counts, predicted: Counts) -> dict[str, float]:
    """Return macro and weighted precision, recall and F1 from the counts of `count_by_class`.

    Counts are sums of weights, so they may be far below 1. A permutation test calls this function
    hundreds of times. Therefore, the function is vectorized over the classes.
    """
    occurs = (support + predicted) > 0
    each = (
        hits / np.maximum(predicted, _TINY),
        hits / np.maximum(support, _TINY),
        2 * hits / np.maximum(support + predicted, _TINY),
    )
    found = [float(values[occurs].mean()) for values in each]
    found += [float(np.average(values, weights=support)) for values in each]
    return dict(zip(AVERAGES, found, strict=True))


def make_average_test(metric: str, labels: Labels, guess: Labels, weights: Floats) -> Tested:
    """Return a permutation test of one of `AVERAGES`.

    Labels and guesses are [n] or [n, positions], with weights [n] or [n, 1]. Labels below 0 are
    ignored.
    """
    size = int(max(labels.max(), guess.max())) + 1

    def tested(order: Labels) -> tuple[float, float]:
        own = labels[order]
        known, each = own >= 0, np.broadcast_to(weights[order], own.shape)
        cells = confusion(own[known], guess[known], size, each[known])
        return (averages(*count_by_class(cells))[metric],) * 2

    return tested
