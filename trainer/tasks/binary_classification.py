"""Yes or no: one logit an example.

label     true or false, 0 or 1, or one of two named classes; the second one is "yes"
outputs   logits [n, 1] of "yes"
loss      binary cross entropy
metrics   accuracy, precision, recall and f1 of "yes" at a probability of 0.5, auc,
average_precision, log_loss, brier_score, calibration_error
answers   `logit` and `probability` of "yes"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from trainer.errors import ConfigError
from trainer.tasks import metrics
from trainer.tasks.base import (
    Constant,
    Direction,
    Examples,
    Part,
    Shape,
    Target,
    drawn,
    mean_of,
    weights_of,
)
from trainer.tasks.exact.areas import Areas, ranked
from trainer.tasks.links import SURE, Sigmoid, logit_of

_TWO = 2
# Of positives that are rarer in training, an area under the ROC says little.
_RARE = 0.1


class BinaryClassification(Sigmoid):
    """See the module."""

    name = "binary_classification"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        **dict.fromkeys(("accuracy", "precision", "recall", "f1"), "higher"),
        **dict.fromkeys(("auc", "average_precision"), "higher"),
        **dict.fromkeys(("log_loss", "brier_score", "calibration_error"), "lower"),
    }
    output_shape: ClassVar[Shape] = (1,)

    def __init__(self, target: Target) -> None:
        """Take one of two values."""
        is_number = target.dtype != "string" and np.dtype(target.dtype).kind in "iub"
        if target.shape or not is_number or target.num_classes not in {0, _TWO}:
            raise ConfigError(
                f"it takes true or false, 0 or 1, or one of two classes, not {target}"
            )
        super().__init__(target)

    @property
    def main_metric(self) -> str:
        """The average precision where positives are rare in training, else the area."""
        counts = self.target.counts.get("train", ())
        return "average_precision" if sum(counts[1:]) < _RARE * sum(counts) else "auc"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of "no" and "yes"."""
        plain = ("false", "true") if self.target.dtype == "bool" else ("0", "1")
        return self.target.labels or plain

    def metrics(self) -> list[keras.Metric]:
        """Return all of `directions`."""
        return [
            metrics.BinaryAccuracy(name="accuracy"),
            metrics.Precision(name="precision"),
            metrics.Recall(name="recall"),
            metrics.F1("f1"),
            metrics.Areas(),
            metrics.BinaryCrossentropy(name="log_loss"),
            metrics.MeanSquaredError(name="brier_score"),
            metrics.CalibrationError(),
        ]

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logit` and `probability`, one of an example."""
        logit = tf.squeeze(outputs, axis=-1)
        return {"logit": logit, "probability": tf.sigmoid(logit)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return np.asarray(answers["logit"])[..., np.newaxis]

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
        matrix = sum(
            metrics.confusion(part.labels.astype(np.int64), part.outputs[:, 0] > 0, _TWO)
            for part in examples.parts()
        )
        part = drawn(examples)
        labels = part.labels.astype(np.int64)
        # The softmax of [0, logit] is the sigmoid.
        logits = np.pad(part.outputs, [[0, 0], [1, 0]])
        names, calibration = list(self.labels), metrics.CalibrationError("float64")
        calibration.update_state(*metrics.likeliest(labels, logits))
        return {
            "confusion_matrix": np.asarray(matrix).tolist(),
            "labels": names,
            "roc": metrics.roc(labels, logits),
            "calibration": calibration.curve(),
            "curves": metrics.curves(labels, logits, names)[1:],
        }

    def constants(self, examples: Examples) -> list[Constant]:
        """Return both classes, and the share of "yes" as the probability."""
        share = mean_of(examples, lambda part: part.labels)
        more, fewer = self.labels[::-1] if share > 1 / 2 else self.labels
        sure = SURE if share > 1 / 2 else -SURE
        return [
            Constant(f"always {more!r}", np.array([sure])),
            Constant(f"always {fewer!r}", np.array([-sure])),
            Constant(f"{share:.3g} for {self.labels[1]!r}", logit_of(share[np.newaxis])),
        ]

    def tested_by(self, metric: str, part: Part) -> tuple[float, float] | None:
        """Return an area; the average precision is tested by the logarithms of the ranks.

        One true example that is the first by chance is most of an average precision of few.
        """
        if metric not in Areas._fields:
            return None
        found, _ = ranked(part.labels.ravel(), part.outputs[:, 0], weights_of(part))
        value = float(getattr(found.areas(), metric))
        return value, value if metric == "auc" else found.log_rank()

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
