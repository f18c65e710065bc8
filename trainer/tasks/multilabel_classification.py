"""Any number of several classes at once.

label     [classes] of 0 and 1, or false and true
outputs   logits [n, classes]; the sigmoid is part of the loss
loss      binary cross entropy, a mean over the classes
metrics   binary_accuracy, subset_accuracy (all classes of an example), micro_precision,
micro_recall, micro_f1, macro_f1, auc and pr_auc (means over the classes),
calibration_error
answers   `logits` and `probabilities`, one column a class
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from trainer.errors import ConfigError
from trainer.tasks import classification_metrics as measured
from trainer.tasks import row_metrics
from trainer.tasks.base import (
    Array,
    Direction,
    Examples,
    Floats,
    Shape,
    Target,
    Task,
    drawn,
    refuse_labels,
)


class MultilabelClassification(Task):
    """See the module; the argument of `task.args` is `labels`, names of the classes."""

    name = "multilabel_classification"
    main_metric = "macro_f1"
    link = "sigmoid"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "binary_accuracy": "higher",
        "subset_accuracy": "higher",
        "micro_precision": "higher",
        "micro_recall": "higher",
        "micro_f1": "higher",
        "macro_f1": "higher",
        "auc": "higher",
        "pr_auc": "higher",
        "calibration_error": "lower",
    }

    def __init__(self, target: Target, *, labels: tuple[str, ...] = ()) -> None:
        """Take a row of yes or no."""
        kind = "" if target.dtype == "string" else np.dtype(target.dtype).kind
        if len(target.shape) != 1 or target.shape[0] < 0 or kind not in "iubf" or not kind:
            raise ConfigError(f"it takes a row of 0 and 1, one for each class, not {target}")
        super().__init__(target)
        self._classes = target.shape[0]
        named = tuple(labels) or (target.labels if len(target.labels) == self._classes else ())
        if named and len(named) != self._classes:
            raise ConfigError(f"labels: {len(named)} names of {self._classes} classes")
        self._labels = named or tuple(map(str, range(self._classes)))

    @property
    def output_shape(self) -> Shape:
        """One logit a class."""
        return self.target.shape

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; their numbers where they have none."""
        return self._labels

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy."""
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return that of a coin for each class."""
        return math.log(2)

    def metrics(self) -> list[keras.Metric]:
        """Return all of `directions`."""
        return [
            row_metrics.BinaryAccuracy(name="binary_accuracy"),
            row_metrics.SubsetAccuracy(),
            row_metrics.Precision(name="micro_precision"),
            row_metrics.Recall(name="micro_recall"),
            row_metrics.F1("micro_f1"),
            row_metrics.F1("macro_f1", average="macro"),
            row_metrics.Areas(self._classes),
            row_metrics.CalibrationError(),
        ]

    def predictions(self, outputs: Any) -> Any:
        """Return probabilities [n, classes]."""
        return tf.sigmoid(outputs)

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, one column a class."""
        return {"logits": outputs, "probabilities": tf.sigmoid(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy [n] in nats."""
        logits = outputs.astype(np.float64)
        each = np.logaddexp(0, np.where(labels.astype(bool), -logits, logits))
        result: Floats = each.mean(axis=1)
        return result

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of the classes that it has, and of those that are predicted."""
        return {
            name: ", ".join(n for n, yes in zip(self._labels, each, strict=True) if yes) or "none"
            for name, each in (("label", label), ("predicted", output > 0))
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return precision, recall and F1 of each class, and curves of those that can have them."""
        hits, support, predicted = (np.zeros(self._classes, np.int64) for _ in range(3))
        for part in examples.parts():
            true, given = part.labels.astype(bool), part.outputs > 0
            hits += (true & given).sum(axis=0)
            support += true.sum(axis=0)
            predicted += given.sum(axis=0)
        part = drawn(examples)
        areas, curves = [], []
        for index, name in enumerate(self._labels):
            true = part.labels[:, index].astype(np.int64)
            logits = np.stack([np.zeros(len(true)), part.outputs[:, index]], axis=1)
            areas.append(measured.exact_areas(true, logits)[1])
            curves += [{**each, "label": name} for each in measured.curves(true, logits, ["", ""])][
                1:
            ]
        rows = measured.per_class((hits, support, predicted), areas, self._labels)
        return {"per_class": rows, "labels": list(self._labels), "curves": curves}

    def check_labels(self, labels: Any) -> None:
        """Refuse other values than 0 and 1."""
        refuse_labels(labels, (labels != 0) & (labels != 1), "which is neither 0 nor 1")

    def check(self) -> None:
        """Refuse other values than 0 and 1."""
        low, high = (self.target.moments.get(name, 0) for name in ("min", "max"))
        if low < 0 or high > 1:
            raise ConfigError(
                f"the label {self.target} has values from {low:g} to {high:g}; "
                f"{self.name} takes 0 and 1"
            )
