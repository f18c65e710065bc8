"""One of several classes, by a label that is its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from trainer.errors import ConfigError
from trainer.tasks import metrics
from trainer.tasks.base import (
    Array,
    Constant,
    Direction,
    Examples,
    Part,
    Shape,
    Tally,
    Target,
    Tested,
    drawn,
    refuse_labels,
    weights_of,
)
from trainer.tasks.links import SURE, Softmax


class MacroF1(keras.Metric):
    """The mean of the F1 of the classes that occur, or that are predicted."""

    def __init__(self, classes: int) -> None:
        """Begin with no examples."""
        super().__init__(name="macro_f1")
        self.counts = self.add_weight(name="counts", shape=(2, classes), initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        labels = tf.cast(tf.reshape(y_true, [-1]), tf.int32)
        found = tf.argmax(y_pred, axis=1, output_type=tf.int32)
        given = tf.ones_like(labels) if sample_weight is None else tf.reshape(sample_weight, [-1])
        weights = tf.cast(given, self.dtype)
        right = weights * tf.cast(labels == found, self.dtype)
        number = self.counts.shape[1]
        hits, true, predicted = (
            tf.math.unsorted_segment_sum(value, classes, number)
            for value, classes in ((right, labels), (weights, labels), (weights, found))
        )
        self.counts.assign_add(tf.stack([hits, true + predicted]))

    def result(self) -> tf.Tensor:
        """Return the mean."""
        hits, either = tf.unstack(tf.convert_to_tensor(self.counts))
        return tf.reduce_mean(tf.boolean_mask(2 * hits / either, either > 0))


class Classification(Softmax):
    """Outputs are logits [n, classes]."""

    name = "classification"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "accuracy": "higher",
        "top_3_accuracy": "higher",
        **dict.fromkeys(metrics.AVERAGES, "higher"),
        "macro_auc": "higher",
        "macro_average_precision": "higher",
        "calibration_error": "lower",
    }

    def __init__(self, target: Target) -> None:
        """Take a whole number that names a class."""
        if target.shape or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(f"it takes one whole number that names a class, not {target}")
        super().__init__(target)

    def check(self) -> None:
        """Refuse numbers below zero, and splits of which no metric would say anything."""
        low = self.target.moments.get("min", 0)
        if low < 0:
            raise ConfigError(
                f"the label {self.target} has values from {low:g} on, and {self.name} counts its "
                "classes from 0; name them in a ClassLabel, or set task.name to regression"
            )
        trained = self.target.counts.get("train", ())
        for split, counts in self.target.counts.items():
            self._check_split(split, counts, trained)

    def _check_split(self, split: str, counts: Sequence[int], trained: Sequence[int]) -> None:
        found = [number for number, count in enumerate(counts) if count]
        if len(found) == 1:
            raise ConfigError(
                f"all examples of the split {split!r} have one {self.target.name!r}, "
                f"{self.labels[found[0]]!r}: a model that knows nothing else would be perfect there"
            )
        if unknown := [self.labels[number] for number in found if not trained[number]]:
            raise ConfigError(
                f"the split {split!r} has examples whose {self.target.name!r} is {unknown[0]!r}, "
                "and the training split has none"
            )

    def check_labels(self, labels: Any) -> None:
        """Refuse a label that names no class."""
        wrong = (labels < 0) | (labels >= self.num_classes)
        refuse_labels(labels, wrong, f"outside of 0 to {self.num_classes - 1}")

    @property
    def output_shape(self) -> Shape:
        """One logit a class."""
        return (self.num_classes,)

    def metrics(self) -> list[keras.Metric]:
        """Return those that may be the main one; all are in `details`, with their intervals."""
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        return [accuracy, MacroF1(self.num_classes)]

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of label and prediction, and the probability of the label."""
        names, probabilities = self.labels, metrics.softmax(output[np.newaxis])[0]
        return {
            "label": names[int(label)],
            "predicted": names[int(output.argmax())],
            "probability": float(probabilities[int(label)]),
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return metrics by class, the confusion matrix, ROC, calibration and intervals.

        A row of `confusion_matrix` is a true class; `per_class` has zeros for one that is absent.
        Areas are exact for as many examples as `drawn` returns, from fine steps for more.
        """
        classes, cells, means = self.num_classes, np.zeros((1, 1)), metrics.Means()
        calibration = metrics.CalibrationError("float64")
        some = drawn(examples)
        areas = None if len(some.labels) == examples.count else metrics.Areas.fine(classes)
        for part in examples.parts():
            labels, logits, weights = arrays = _arrays(part)
            cells = cells + metrics.confusion(labels, logits.argmax(axis=1), classes, weights)
            means.add(*arrays)
            calibration.update_state(*metrics.likeliest(labels, logits), weights)
            if areas:
                own = labels[:, np.newaxis] == np.arange(classes)
                areas.update_state(own, np.exp(metrics.log_softmax(logits)), weights)
        labels, logits, weights = _arrays(some)
        found = areas.of_each() if areas else metrics.exact_areas(labels, logits, weights)
        names, counts = list(self.labels), metrics.by_class(cells)
        return {
            "metrics": {
                **means.metrics(),
                **metrics.averages(*counts),
                **{f"macro_{name}": metrics.mean_area(found, name) for name in metrics.NO_AREA},
                "calibration_error": float(calibration.result()),
            },
            "intervals": {
                **means.intervals(),
                **metrics.intervals_of_averages(cells, means.examples),
            },
            "per_class": metrics.per_class(counts, found, names),
            "confusion_matrix": [[metrics.plain(each) for each in row] for row in cells],
            "roc": metrics.roc(labels, logits),
            "labels": names,
            "calibration": calibration.curve(),
            "curves": metrics.curves(labels, logits, names),
        }

    def constants(self, examples: Examples) -> list[Constant]:
        """Return the most frequent class, and each class as often as it occurs."""
        counts = np.zeros(self.num_classes)
        for part in examples.parts():
            labels, _, weights = _arrays(part)
            counts += np.bincount(labels, weights, self.num_classes)
        shares, top = counts / counts.sum(), int(counts.argmax())
        return [
            Constant(f"always {self.labels[top]!r}", SURE * (np.arange(len(counts)) == top)),
            Constant("each class as often as it occurs", np.log(np.maximum(shares, np.exp(-SURE)))),
        ]

    def tested_by(self, metric: str, part: Part) -> Tested | None:
        """Test a mean over the classes by itself."""
        if metric not in metrics.AVERAGES:
            return None
        labels, logits, weights = _arrays(part)
        return metrics.tested_average(metric, labels, logits.argmax(axis=1), weights)

    def tally(self) -> Tally:
        """Return what gathers the metrics that are worth it for a slice."""
        return _OfSlice(self.num_classes)


class _OfSlice(Tally):
    """Counts by class, and means."""

    def __init__(self, classes: int) -> None:
        self._means = metrics.Means()
        self._hits, self._support, self._predicted = np.zeros((3, classes))

    def add(self, part: Part) -> None:
        """Add some examples."""
        labels, logits, weights = _arrays(part)
        guess, count = logits.argmax(axis=1), len(self._hits)
        right = guess == labels
        self._means.add(labels, logits, weights)
        self._hits += np.bincount(labels[right], weights[right], count)
        self._support += np.bincount(labels, weights, count)
        self._predicted += np.bincount(guess, weights, count)

    def result(self) -> dict[str, Any]:
        """Return both."""
        averages = metrics.averages(self._hits, self._support, self._predicted)
        return {
            "metrics": {**self._means.metrics(), **averages},
            "intervals": self._means.intervals(),
        }


def _arrays(part: Part) -> tuple[Array, Array, Array]:
    """Return labels, logits and weights; 1 each where the examples have none."""
    return part.labels.astype(np.int64), part.outputs, weights_of(part)
