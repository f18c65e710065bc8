"""One of several classes, by a label that is its number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from trainer.errors import ConfigError
from trainer.tasks import classification_metrics as measured
from trainer.tasks.base import Array, Direction, Examples, Floats, Part, Shape, Target, Task

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
        "roc_auc": "higher",
        "pr_auc": "higher",
        "calibration_error": "lower",
    }

    def __init__(self, target: Target) -> None:
        """Take a whole number that names a class."""
        if target.shape or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(f"it takes one whole number that names a class, not {target}")
        super().__init__(target)
        self.num_classes = target.num_classes or _SOME_CLASSES

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
        """
        parts = list(examples.parts())
        labels = np.concatenate([part.labels for part in parts]).astype(np.int64)
        logits = np.concatenate([part.outputs for part in parts])
        names = list(self.labels)
        each = measured.per_class(labels, logits, names)
        calibration = measured.calibration(labels, logits)
        return {
            "metrics": {
                **measured.headline(labels, logits),
                "roc_auc": measured.mean_area(each, "roc_auc"),
                "pr_auc": measured.mean_area(each, "pr_auc"),
                "calibration_error": calibration["error"],
            },
            "intervals": measured.intervals(labels, logits),
            "per_class": each,
            "confusion_matrix": measured.confusion(labels, logits),
            "roc": measured.roc(labels, logits),
            "labels": names,
            "calibration": calibration["bins"],
            "curves": measured.curves(labels, logits, names),
        }

    def of_slice(self, part: Part) -> dict[str, Any]:
        """Return the metrics that are worth it for a small part."""
        labels, logits = part.labels.astype(np.int64), part.outputs
        return {
            "metrics": measured.headline(labels, logits),
            "intervals": measured.intervals_of_means(labels, logits),
        }
