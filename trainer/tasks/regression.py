"""Regression of one number, or of an array of a fixed shape.

    label     numbers of any type
    outputs   floats in the label's shape; [n, 1] if the label is a single number
    loss      mean squared error
    metrics   mean_absolute_error, mean_squared_error, root_mean_squared_error, r2_score
    answers   `prediction`, in the label's units and shape

With `standardize`, outputs are standardized with the label's mean and standard deviation in the
training split, which helps the optimizer. Without it, they are in the label's units, as in plain
Keras. Metrics and answers are always in the label's units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import metrics
from flotilla.trainer.tasks.base import (
    Array,
    Constant,
    Direction,
    Examples,
    Floats,
    Shape,
    Tally,
    Target,
    Task,
    example_weights,
    refuse_labels,
    sample_examples,
    weighted_mean,
)
from flotilla.trainer.tasks.metrics import rows
from flotilla.trainer.tasks.tallies import RegressionTally

_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_BINS = 20
# Limit on the values in the sample for the median, which may always have `_LEAST` examples.
_HELD, _LEAST = 1 << 22, 100_000


class SquaredError(keras.losses.Loss):
    """The mean of (output - label)^2 over all numbers of an example."""

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:
        """Return the loss of each example [n]."""
        return tf.reduce_mean(tf.square(rows(y_pred) - rows(y_true)), axis=1)


class Regression(Task):
    """A task with numeric outputs. `task.args` may set `standardize`."""

    name = "regression"
    main_metric = "mean_absolute_error"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "mean_absolute_error": "lower",
        "mean_squared_error": "lower",
        "root_mean_squared_error": "lower",
        "r2_score": "higher",
    }

    def __init__(self, target: Target, *, standardize: bool = False) -> None:
        """Require a target with numbers of a fixed shape."""
        if target.dtype == "string" or np.dtype(target.dtype).kind not in "iubf":
            raise ConfigError(f"the label must be numeric, not {target}")
        if target.labels and target.labels != tuple(map(str, range(len(target.labels)))):
            some = ", ".join(target.labels[:3])
            raise ConfigError(
                f"the label must be numeric, but {target.name!r} was read as classes ({some}, "
                f"...); set data.types: {{{target.name}: float}}"
            )
        if min(target.shape, default=0) < 0:
            raise ConfigError(
                f"the label must have a fixed shape, not {target}; set a length in data.shapes"
            )
        if not isinstance(standardize, bool):
            raise ConfigError(
                f"standardize: {standardize!r} is not allowed; it must be true or false"
            )
        super().__init__(target)
        self._standardized = standardize
        self.in_units = not standardize
        # Before preparation, the moments are unknown. Use defaults, because nothing is trained yet.
        mean, std = target.moments.get("mean", 0.0), target.moments.get("std", 1.0)
        self._mean, self._std = (mean, std or 1.0) if standardize else (0.0, 1.0)

    @property
    def scale(self) -> tuple[float, float]:
        """The mean and standard deviation that standardize outputs, or 0 and 1."""
        return float(self._mean), float(self._std)

    @property
    def output_shape(self) -> Shape:
        """The label's shape, or (1,) for a single number, because a dense layer returns [n, 1]."""
        return self.target.shape or (1,)

    def loss(self) -> keras.losses.Loss:
        """Return the mean squared error."""
        return SquaredError(name="mean_squared_error")

    def loss_labels(self, labels: Any) -> Any:
        """Return the labels in the units of the outputs."""
        return (tf.cast(labels, tf.float32) - self._mean) / self._std

    def chance_loss(self) -> float:
        """Return the loss of a model that returns zeros, as an untrained model does."""
        if self._standardized:
            return 1.0
        mean, std = self.target.moments.get("mean", 0.0), self.target.moments.get("std", 1.0)
        # Return 1 if all labels, and therefore both moments, are zero.
        return mean**2 + std**2 or 1.0

    def metrics(self) -> list[keras.Metric]:
        """Return the errors in the label's units, and R2."""
        numbers = math.prod(self.output_shape)
        return [
            metrics.MeanAbsoluteError(name="mean_absolute_error"),
            metrics.MeanSquaredError(name="mean_squared_error"),
            metrics.RootMeanSquaredError(name="root_mean_squared_error"),
            metrics.R2Score(numbers, self.target.moments.get("mean", 0.0)),
        ]

    def predictions(self, outputs: Any) -> Any:
        """Convert outputs to the label's units. The shape stays the same."""
        return outputs * self._std + self._mean

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the column `prediction`, in the label's units."""
        found = self.predictions(outputs)
        return {"prediction": found if self.target.shape else tf.squeeze(found, axis=-1)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Convert predictions to outputs, with this task's standardization."""
        numbers = np.asarray(answers["prediction"])
        shaped = numbers if self.target.shape else numbers[..., np.newaxis]
        return (shaped - self._mean) / self._std

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the mean squared error of each example [n]."""
        standardized = (_flat(labels) - self._mean) / self._std
        result: Floats = ((_flat(outputs) - standardized) ** 2).mean(axis=1)
        return result

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the label, the prediction, and the error with the largest absolute value."""
        true = np.ravel(label).astype(np.float64)
        predicted = np.ravel(self.predictions(output)).astype(np.float64)
        error = predicted - true
        return {
            "label": _text(true),
            "predicted": _text(predicted),
            "error": float(error[np.abs(error).argmax()]),
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the quantiles of the absolute error, and charts of predictions and residuals."""
        part = sample_examples(examples)
        true = _flat(part.labels)
        predicted = _flat(self.predictions(part.outputs))
        quantiles = np.quantile(np.abs(predicted - true), _QUANTILES)
        means, residuals = _bin(true, predicted), _bin(predicted, predicted - true)
        table = {
            "title": "Quantiles of the absolute error",
            "columns": ["Share of the numbers", "Error at most"],
            "rows": [[f"{s:.0%}", float(q)] for s, q in zip(_QUANTILES, quantiles, strict=True)],
        }
        over_labels = {
            "title": "Predictions over labels",
            "x": "label",
            "y": "prediction",
            "series": {"mean prediction": means, "exact": [[x, x] for x, _ in means]},
        }
        over_predictions = {
            "title": "Residuals over predictions",
            "x": "prediction",
            "y": "prediction - label",
            "series": {"mean residual": residuals, "none": [[x, 0.0] for x, _ in residuals]},
        }
        return {"tables": [table], "charts": [over_labels, over_predictions]}

    def constants(self, examples: Examples) -> list[Constant]:
        """Return the mean and the median of the labels."""
        mean = weighted_mean(examples, lambda part: _flat(part.labels))
        some = sample_examples(examples, max(_HELD // len(mean), _LEAST))
        median = _median(_flat(some.labels), example_weights(some))
        return [
            Constant(
                f"always {value[0]:.4g}" if len(value) == 1 else f"always the {name}",
                ((value - self._mean) / self._std).reshape(self.output_shape),
            )
            for name, value in (("mean", mean), ("median", median))
        ]

    def tally(self) -> Tally:
        """Return an accumulator of all metrics in `directions`."""
        return RegressionTally(math.prod(self.output_shape), 1 / self._std, self.predictions)

    def check_labels(self, labels: Any) -> None:
        """Raise `SplitError` for a label that is not finite."""
        refuse_labels(labels, ~np.isfinite(labels), "which is not a finite number")

    def check(self) -> None:
        """Refuse labels that are not finite numbers, or are all equal in training."""
        if not self.target.moments:
            raise ConfigError(f"the label {self.target} has values that are not finite numbers")
        if not self.target.moments["std"]:
            value = self.target.moments["mean"]
            raise ConfigError(f"the label {self.target} is {value:g} in all training examples")


def _flat(values: Any) -> Floats:
    numbers = np.asarray(values)
    result: Floats = numbers.reshape(len(numbers), -1).astype(np.float64)
    return result


def _text(numbers: Floats) -> float | str:
    return float(numbers[0]) if len(numbers) == 1 else " ".join(f"{each:.4g}" for each in numbers)


def _bin(x: Floats, y: Floats) -> list[list[float]]:
    """Sort points by x, divide them into bins of equal size, and return the means of each bin."""
    order = np.argsort(x, axis=None, kind="stable")
    bins = [each for each in np.array_split(order, _BINS) if len(each)]
    return [[float(x.ravel()[each].mean()), float(y.ravel()[each].mean())] for each in bins]


def _median(numbers: Floats, weights: Floats) -> Floats:
    order = np.argsort(numbers, axis=0)
    passed = np.cumsum(weights[order], axis=0)
    place = (passed < weights.sum() / 2).sum(axis=0)
    result: Floats = np.take_along_axis(numbers, order, axis=0)[place, np.arange(len(place))]
    return result
