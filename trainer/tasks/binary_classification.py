"""Binary classification: one logit per example.

label     true or false, 0 or 1, or one of two named classes. Class 1 is positive; see
          `flotilla.trainer.tasks.registry.set_positive`
outputs   logits [n, 1] of the positive class
loss      binary cross entropy
metrics   accuracy, precision, recall and f1 of the positive class at a probability threshold,
          which is 0.5 until an evaluation chooses one; auc, average_precision, log_loss,
          brier_score, calibration_error
answers   `logit` and `probability` of the positive class
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

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
    Part,
    Shape,
    Tally,
    Target,
    Tested,
    example_weights,
    sample_examples,
    weighted_mean,
)
from flotilla.trainer.tasks.classification import SURE, Sigmoid, compute_logit
from flotilla.trainer.tasks.exact.areas import Areas, rank_scores
from flotilla.trainer.tasks.exact.tallies import BinaryTally

TWO = 2
# Below this fraction of positives in training, the area under the ROC curve is uninformative.
_RARE = 0.1


class Threshold(NamedTuple):
    """The probability above which an example is predicted positive, and how it was chosen.

    `chosen_on` is the split on which it was chosen, or empty for the default threshold. `examples`
    is the number of examples that were used.
    """

    value: float = 0.5
    chosen_on: str = ""
    examples: int = 0


def get_class_names(target: Target) -> tuple[str, ...]:
    """Return a target's class names. Without names, return defaults for two classes, else ()."""
    plain = ("false", "true") if target.dtype == "bool" else ("0", "1")
    return target.labels or (plain if target.num_classes in {0, TWO} else ())


class BinaryClassification(Sigmoid):
    """A task with one logit per example. See the module docstring."""

    name = "binary_classification"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        **dict.fromkeys(("accuracy", "precision", "recall", "f1"), "higher"),
        **dict.fromkeys(("auc", "average_precision"), "higher"),
        **dict.fromkeys(("log_loss", "brier_score", "calibration_error"), "lower"),
    }
    output_shape: ClassVar[Shape] = (1,)
    positive_by = "rarity"
    threshold = Threshold()

    def __init__(self, target: Target) -> None:
        """Require a scalar target with two possible values."""
        is_number = target.dtype != "string" and np.dtype(target.dtype).kind in "iub"
        if target.shape or not is_number or target.num_classes not in {0, TWO}:
            raise ConfigError(
                f"the label must be true or false, 0 or 1, or one of two classes, not {target}"
            )
        super().__init__(target)

    @property
    def main_metric(self) -> str:
        """`average_precision` if positives are rare in training, else `auc`."""
        counts = self.target.counts.get("train", ())
        return "average_precision" if sum(counts[1:]) < _RARE * sum(counts) else "auc"

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the negative and the positive class, in this order."""
        return get_class_names(self.target)

    def metrics(self) -> list[keras.Metric]:
        """Return the metrics of a validation."""
        at = self.threshold.value
        return [
            metrics.BinaryAccuracy(name="accuracy", threshold=at),
            metrics.Precision(name="precision", thresholds=at),
            metrics.Recall(name="recall", thresholds=at),
            metrics.F1("f1", threshold=at),
            metrics.Areas(),
            metrics.BinaryCrossentropy(name="log_loss"),
            metrics.MeanSquaredError(name="brier_score"),
            metrics.CalibrationError(),
        ]

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logit` and `probability` of the positive class, one of each per example."""
        logit = tf.squeeze(outputs, axis=-1)
        return {"logit": logit, "probability": tf.sigmoid(logit)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits of the positive class, even if the model returns two logits."""
        if "logits" in answers:
            return np.diff(answers["logits"], axis=-1)
        return np.asarray(answers["logit"])[..., np.newaxis]

    def predicted(self, outputs: Any) -> Array | None:
        """Return the predicted class of each example, according to the threshold."""
        return self.decide(outputs).astype(np.int64)

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of the true and predicted class, and the probability of the true one."""
        yes, logit = bool(label), float(output[0])
        return {
            "label": self.labels[int(yes)],
            "predicted": self.labels[int(self.decide(output[np.newaxis])[0])],
            "probability": float(np.exp(-np.logaddexp(0, -logit if yes else logit))),
        }

    def decide(self, outputs: Any) -> Array:
        """Return whether each example is predicted positive [n]."""
        result: Array = tf.sigmoid(outputs[:, 0]).numpy() > np.float32(self.threshold.value)
        return result

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the positive class, the threshold, and the ROC and precision-recall curves."""
        part, names = sample_examples(examples), list(self.labels)
        labels = part.labels.astype(np.int64)
        # Add a logit of 0 for the negative class: softmax([0, x])[1] equals sigmoid(x).
        logits = np.pad(part.outputs, [[0, 0], [1, 0]])
        return {
            "positive": names[1],
            "threshold": self.threshold._asdict(),
            "labels": names,
            "roc": metrics.roc(labels, logits),
            "curves": metrics.curves(labels, logits, names)[1:],
        }

    def tally(self) -> Tally:
        """Return an accumulator of all metrics in `directions`."""
        return BinaryTally(self.decide)

    def constants(self, examples: Examples) -> list[Constant]:
        """Return three constants: always one class, always the other, and the positive fraction."""
        share = weighted_mean(examples, lambda part: part.labels)
        more, fewer = self.labels[::-1] if share > 1 / 2 else self.labels
        sure = SURE if share > 1 / 2 else -SURE
        return [
            Constant(f"always {more!r}", np.array([sure])),
            Constant(f"always {fewer!r}", np.array([-sure])),
            Constant(f"{share:.3g} for {self.labels[1]!r}", compute_logit(share[np.newaxis])),
        ]

    def make_test(self, metric: str, part: Part) -> Tested | None:
        """Return a permutation test of `auc` or `average_precision`.

        For `average_precision`, the test statistic is the mean log rank of the positive examples.
        The metric itself is unsuitable, because one positive example at rank 1 can dominate it.
        """
        if metric not in Areas._fields:
            return None
        labels, weights = part.labels.ravel(), example_weights(part)
        scores = part.outputs[:, 0]
        ranks = np.argsort(-scores)

        def tested(order: Array) -> tuple[float, float]:
            again = rank_scores(labels[order], scores, weights[order], ranks)
            value = float(getattr(again.areas(), metric))
            return value, value if metric == "auc" else again.log_rank()

        return tested

    def check_output(self, output: Any, last: Any) -> None:
        """Require one logit per example. The error for two logits suggests two corrections."""
        if tuple(getattr(output, "shape", ()))[1:] == (TWO,) and self.output_shape == (1,):
            raise ConfigError(
                f"the output has two columns, but {self.name} of {self.target} needs one logit, "
                f"for {self.labels[1]!r}; end with Dense(1), or set task.name to classification"
            )
        super().check_output(output, last)

    def check(self) -> None:
        """Refuse labels with more than two values, and splits with only one class."""
        for split, counts in self.target.counts.items():
            if len(counts) > TWO:
                raise ConfigError(
                    f"the label {self.target.name!r} has {len(counts)} classes in the dataset, "
                    f"but {self.name} needs two; set task.name to classification"
                )
            missing = [name for name, count in zip(self.labels, counts, strict=False) if not count]
            if sum(counts) and (missing or len(counts) < TWO):
                name = missing[0] if missing else self.labels[1]
                raise ConfigError(
                    f"the split {split!r} has no example whose {self.target.name!r} is {name!r}, "
                    f"but {self.name} needs both classes"
                )
