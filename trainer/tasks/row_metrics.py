"""Metrics of Keras over the numbers of an example, whatever the shapes; and two that it lacks.

Keras's own broadcast weights [n] to labels of more axes in ways of their own. Here labels and
predictions become rows, [n, numbers], first.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

# The logit is cut into equal steps, since probabilities of what is rare are all close to 0.
_LARGEST_LOGIT = 12
_STEPS = 400
_BINS = 15


def rows(values: Any) -> tf.Tensor:
    """Return the numbers of each example as one row: [n, numbers]."""
    return tf.reshape(values, [tf.shape(values)[0], math.prod(values.shape[1:])])


class _OfRows:
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Add a batch."""
        update = super().update_state  # type: ignore[misc]
        return update(rows(y_true), rows(y_pred), sample_weight=sample_weight)


class MeanAbsoluteError(_OfRows, keras.metrics.MeanAbsoluteError):
    """Keras's."""


class MeanSquaredError(_OfRows, keras.metrics.MeanSquaredError):
    """Keras's."""


class RootMeanSquaredError(_OfRows, keras.metrics.RootMeanSquaredError):
    """Keras's."""


class BinaryAccuracy(_OfRows, keras.metrics.BinaryAccuracy):
    """Keras's."""


class BinaryCrossentropy(_OfRows, keras.metrics.BinaryCrossentropy):
    """Keras's."""


class Precision(_OfRows, keras.metrics.Precision):
    """Keras's."""


class Recall(_OfRows, keras.metrics.Recall):
    """Keras's."""


class F1(_OfRows, keras.metrics.F1Score):
    """Keras's, at a probability of 0.5."""

    def __init__(self, name: str, average: str = "micro") -> None:
        """Average over the classes, or count the numbers of all of them together."""
        super().__init__(average=average, threshold=0.5, name=name)


class R2Score(keras.Metric):
    """The share of the variance that is explained, as a mean over the numbers of an example.

    Keras's own adds up squares of the labels, whose single precision ends where their mean is far
    above their deviation. Here they are taken from a value near the mean.
    """

    def __init__(self, numbers: int, near: float) -> None:
        """Measure rows of so many numbers, around a value near their mean."""
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
        """Return the mean; of equal labels it is 1 if they are all met, else 0."""
        weight, total, squares, residual = map(
            tf.convert_to_tensor, (self.weight, self.total, self.squares, self.residual)
        )
        variance = squares - tf.math.divide_no_nan(total**2, weight)
        constant = tf.cast(residual <= 0, self.dtype)
        explained = 1 - tf.math.divide_no_nan(residual, variance)
        return tf.reduce_mean(tf.where(variance > 0, explained, constant))


class CalibrationError(keras.Metric):
    """How far probabilities are from shares: the mean of |probability - share of true labels|.

    The mean is over bins of equal width, weighted by what is in them (Guo et al. 2017).
    """

    def __init__(self) -> None:
        """Measure nothing yet."""
        super().__init__(name="calibration_error")
        self.weight, self.sure, self.true = (
            self.add_weight(name=name, shape=(_BINS,), initializer="zeros")
            for name in ("weight", "sure", "true")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        true, sure = (tf.cast(rows(each), self.dtype) for each in (y_true, y_pred))
        weight = tf.broadcast_to(_column(true, sample_weight), tf.shape(true))
        place = tf.minimum(tf.cast(sure * _BINS, tf.int32), _BINS - 1)
        for variable, values in (
            (self.weight, weight),
            (self.sure, weight * sure),
            (self.true, weight * true),
        ):
            flat = (tf.reshape(each, [-1]) for each in (values, place))
            variable.assign_add(tf.math.unsorted_segment_sum(*flat, _BINS))

    def result(self) -> tf.Tensor:
        """Return the error."""
        weight, sure, true = map(tf.convert_to_tensor, (self.weight, self.sure, self.true))
        return tf.math.divide_no_nan(tf.reduce_sum(tf.abs(sure - true)), tf.reduce_sum(weight))


class Areas(keras.Metric):
    """`auc`, the area under the ROC, and `pr_auc`, the average precision; means over the numbers.

    From counts of both kinds of labels at each step of the logit, which tell apart small
    probabilities; Keras's has equal steps of the probability. A number whose labels are all of one
    kind has no area, and where none has one both are not a number.
    """

    def __init__(self, numbers: int = 1) -> None:
        """Measure rows of so many probabilities."""
        super().__init__(name="areas")
        self._numbers = numbers
        self.true, self.false = (
            self.add_weight(name=name, shape=(numbers, _STEPS), initializer="zeros")
            for name in ("true", "false")
        )

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        true, sure = (tf.cast(rows(each), self.dtype) for each in (y_true, y_pred))
        weight = tf.broadcast_to(_column(true, sample_weight), tf.shape(true))
        logit = tf.math.log(sure) - tf.math.log1p(-sure)
        share = tf.clip_by_value(logit / (2 * _LARGEST_LOGIT) + 0.5, 0, 1)
        step = tf.minimum(tf.cast(share * _STEPS, tf.int32), _STEPS - 1)
        place = tf.reshape(step + _STEPS * tf.range(self._numbers), [-1])
        for variable, kind in ((self.true, true), (self.false, 1 - true)):
            flat = tf.reshape(weight * kind, [-1])
            count = tf.math.unsorted_segment_sum(flat, place, self._numbers * _STEPS)
            variable.assign_add(tf.reshape(count, variable.shape))

    def result(self) -> dict[str, tf.Tensor]:
        """Return both."""
        true, false = map(tf.convert_to_tensor, (self.true, self.false))
        hits, misses = (tf.cumsum(each, axis=1, reverse=True) for each in (true, false))
        both = (hits[:, 0] > 0) & (misses[:, 0] > 0)
        of_all = tf.boolean_mask(hits[:, :1] * misses[:, :1], both)[:, 0]
        # Half of what is at the same step is above it.
        above = tf.boolean_mask(tf.reduce_sum(false * (hits - true / 2), axis=1), both)
        precise = tf.reduce_sum(true * tf.math.divide_no_nan(hits, hits + misses), axis=1)
        return {
            "auc": tf.reduce_mean(above / of_all),
            "pr_auc": tf.reduce_mean(tf.boolean_mask(precise / hits[:, 0], both)),
        }


class SubsetAccuracy(keras.metrics.MeanMetricWrapper):
    """The share of examples all of whose labels are right."""

    def __init__(self) -> None:
        """Take 0.5 as the threshold."""
        super().__init__(_all_right, name="subset_accuracy")


def _all_right(true: Any, predicted: Any) -> tf.Tensor:
    right = (rows(predicted) > 0.5) == (rows(tf.cast(true, tf.float32)) > 0.5)  # noqa: PLR2004
    return tf.cast(tf.reduce_all(right, axis=1), tf.float32)


def _column(values: tf.Tensor, weights: Any) -> tf.Tensor:
    given = tf.ones_like(values[:, 0]) if weights is None else weights
    return tf.cast(given, values.dtype)[:, tf.newaxis]
