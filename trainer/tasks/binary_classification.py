"""Yes or no: one logit an example.

label     true or false, 0 or 1, or one of two named classes; the second one is "yes"
outputs   logits [n, 1] of "yes"; the sigmoid is part of the loss
loss      binary cross entropy
metrics   accuracy, precision, recall and f1 of "yes" at a probability of 0.5, auc, pr_auc,
log_loss, brier_score, calibration_error
answers   `logit` and `probability` of "yes"
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

_TWO = 2


class BinaryClassification(Task):
    """See the module."""

    name = "binary_classification"
    main_metric = "auc"
    link = "sigmoid"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "accuracy": "higher",
        "precision": "higher",
        "recall": "higher",
        "f1": "higher",
        "auc": "higher",
        "pr_auc": "higher",
        "log_loss": "lower",
        "brier_score": "lower",
        "calibration_error": "lower",
    }
    output_shape: ClassVar[Shape] = (1,)

    def __init__(self, target: Target) -> None:
        """Take one of two values."""
        takes = "it takes true or false, 0 or 1, or one of two classes"
        if target.shape or target.dtype == "string" or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(f"{takes}, not {target}")
        if target.num_classes not in {0, _TWO}:
            raise ConfigError(f"{takes}, not {target}")
        super().__init__(target)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of "no" and "yes"."""
        plain = ("false", "true") if self.target.dtype == "bool" else ("0", "1")
        return self.target.labels or plain

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy."""
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return that of a coin."""
        return math.log(2)

    def metrics(self) -> list[keras.Metric]:
        """Return all of `directions`."""
        return [
            row_metrics.BinaryAccuracy(name="accuracy"),
            row_metrics.Precision(name="precision"),
            row_metrics.Recall(name="recall"),
            row_metrics.F1("f1"),
            row_metrics.Areas(),
            row_metrics.BinaryCrossentropy(name="log_loss"),
            row_metrics.MeanSquaredError(name="brier_score"),
            row_metrics.CalibrationError(),
        ]

    def predictions(self, outputs: Any) -> Any:
        """Return the probabilities [n, 1] of "yes"."""
        return tf.sigmoid(outputs)

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logit` and `probability`, one of an example."""
        logit = tf.squeeze(outputs, axis=-1)
        return {"logit": logit, "probability": tf.sigmoid(logit)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return np.asarray(answers["logit"])[..., np.newaxis]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy [n] in nats."""
        logits = outputs[:, 0].astype(np.float64)
        result: Floats = np.logaddexp(0, np.where(labels.astype(bool), -logits, logits))
        return result

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of label and prediction, and the probability of the label."""
        yes, logit = bool(label), float(output[0])
        return {
            "label": self.labels[int(yes)],
            "predicted": self.labels[int(logit > 0)],
            "probability": float(np.exp(-np.logaddexp(0, -logit if yes else logit))),
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the confusion matrix, ROC and precision over recall, and calibration."""
        matrix = np.zeros((_TWO, _TWO), np.int64)
        for part in examples.parts():
            cells = _TWO * part.labels.astype(np.int64) + (part.outputs[:, 0] > 0)
            matrix += np.bincount(cells, minlength=_TWO**2).reshape(_TWO, _TWO)
        part = drawn(examples)
        labels = part.labels.astype(np.int64)
        # The softmax of [0, logit] is the sigmoid.
        logits = np.pad(part.outputs, [[0, 0], [1, 0]])
        names = list(self.labels)
        return {
            "confusion_matrix": matrix.tolist(),
            "labels": names,
            "roc": measured.roc(labels, logits),
            "calibration": measured.calibration(labels, logits)["bins"],
            "curves": measured.curves(labels, logits, names)[1:],
        }

    def check_labels(self, labels: Any) -> None:
        """Refuse other values than 0 and 1."""
        refuse_labels(labels, (labels != 0) & (labels != 1), "which is neither 0 nor 1")

    def check(self) -> None:
        """Refuse a split in which only one of both occurs: it cannot be told how well they part."""
        for split, counts in self.target.counts.items():
            if len(counts) > _TWO:
                raise ConfigError(
                    f"the label {self.target.name!r} has {len(counts)} values in the dataset, from "
                    "0 on; set task.name to classification"
                )
            missing = [name for name, count in zip(self.labels, counts, strict=False) if not count]
            if sum(counts) and (missing or len(counts) < _TWO):
                name = missing[0] if missing else self.labels[1]
                raise ConfigError(
                    f"the split {split!r} has no example whose {self.target.name!r} is {name!r}: "
                    f"{self.name} needs both"
                )
