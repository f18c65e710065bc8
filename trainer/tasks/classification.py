"""One of several classes, by a label that is its number."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from trainer.errors import ConfigError
from trainer.tasks import classification_metrics as measured
from trainer.tasks.base import (
    Array,
    Direction,
    Examples,
    Floats,
    Part,
    Shape,
    Tally,
    Target,
    Task,
    drawn,
    refuse_labels,
)

# Of a label without names the number of classes is known once the dataset is prepared.
_SOME_CLASSES = 2
_SHARES = ("precision", "recall", "f1")


class Classification(Task):
    """Outputs are logits [n, classes]; the softmax is part of the loss."""

    name = "classification"
    main_metric = "accuracy"
    link = "softmax"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "accuracy": "higher",
        "top_3_accuracy": "higher",
        **{f"{a}_{b}": "higher" for a in ("macro", "weighted") for b in _SHARES},
        "auc": "higher",
        "pr_auc": "higher",
        "calibration_error": "lower",
    }

    def __init__(self, target: Target) -> None:
        """Take a whole number that names a class."""
        if target.shape or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(f"it takes one whole number that names a class, not {target}")
        super().__init__(target)
        self.num_classes = target.num_classes or _SOME_CLASSES

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

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where they have none."""
        return self.target.labels or tuple(map(str, range(self.num_classes)))

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return that of equal probabilities."""
        return math.log(max(2, self.num_classes))

    def metrics(self) -> list[keras.Metric]:
        """Return the accuracy; all others are in `details`, where their intervals are as well."""
        return [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]

    def predictions(self, outputs: Any) -> Any:
        """Return probabilities [n, classes]."""
        return tf.nn.softmax(outputs)

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, one column a class."""
        return {"logits": outputs, "probabilities": tf.nn.softmax(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy [n] in nats."""
        return measured.losses(labels.astype(np.int64), outputs)

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of label and prediction, and the probability of the label."""
        names, probabilities = self.labels, measured.softmax(output[np.newaxis])[0]
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
        cells = np.zeros((self.num_classes, self.num_classes))
        means, calibration = measured.Means(), measured.Calibration()
        some = drawn(examples)
        areas = None if len(some.labels) == examples.count else measured.Areas(self.num_classes)
        for part in examples.parts():
            labels, logits, weights = _arrays(part)
            places = labels * self.num_classes + logits.argmax(axis=1)
            cells += np.bincount(places, weights, cells.size).reshape(cells.shape)
            means.add(labels, logits, weights)
            calibration.add(labels, logits, weights)
            if areas:
                areas.add(labels, logits, weights)
        labels, logits, weights = _arrays(some)
        found = areas.result() if areas else measured.exact_areas(labels, logits, weights)
        names = list(self.labels)
        counts = (np.diag(cells), cells.sum(axis=1), cells.sum(axis=0))
        of_classes = measured.per_class(counts, found, names)
        return {
            "metrics": {
                **means.metrics(),
                **measured.averages(*counts),
                "auc": measured.mean_area(of_classes, "auc"),
                "pr_auc": measured.mean_area(of_classes, "pr_auc"),
                "calibration_error": calibration.result()["error"],
            },
            "intervals": {
                **means.intervals(),
                **measured.intervals_of_averages(cells, means.examples),
            },
            "per_class": of_classes,
            "confusion_matrix": [[measured.plain(each) for each in row] for row in cells],
            "roc": measured.roc(labels, logits),
            "labels": names,
            "calibration": calibration.result()["bins"],
            "curves": measured.curves(labels, logits, names),
        }

    def tally(self) -> Tally:
        """Return what gathers the metrics that are worth it for a slice."""
        return _OfSlice(self.num_classes)


class _OfSlice(Tally):
    """Counts by class, and means."""

    def __init__(self, classes: int) -> None:
        self._means = measured.Means()
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
        averages = measured.averages(self._hits, self._support, self._predicted)
        metrics = {**self._means.metrics(), **averages}
        return {"metrics": metrics, "intervals": self._means.intervals()}


def _arrays(part: Part) -> tuple[Array, Array, Array]:
    """Return labels, logits and weights; 1 each where the examples have none."""
    weights = np.ones(len(part.labels)) if part.weights is None else part.weights
    return part.labels.astype(np.int64), part.outputs, weights.astype(np.float64).ravel()
