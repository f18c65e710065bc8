"""Classification with one class per example, and the bases of all classifications.

`Softmax` and `Sigmoid` define the loss, the predictions, the answers and their inverse. A subclass
defines its labels and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    Part,
    Shape,
    Tally,
    Target,
    Task,
    Tested,
    example_weights,
    refuse_labels,
    sample_examples,
)
from flotilla.trainer.tasks.exact.tallies import ClassTally

# If the frequency of the rarest class is below this fraction of 1 / classes, accuracy is not a
# suitable main metric.
_RARE = 0.2
#: Logit that represents a probability of 1. Its negative represents 0.
SURE = 20.0
# Assumed number of classes before preparation, if the dataset does not declare it.
_SOME_CLASSES = 2


class Softmax(Task):
    """A task that predicts one of several classes. Outputs are logits [n, ..., classes]."""

    link = "softmax"

    def __init__(self, target: Target) -> None:
        """Store a target whose values are class numbers."""
        super().__init__(target)
        self.num_classes = target.num_classes or _SOME_CLASSES

    @property
    def main_metric(self) -> str:
        """`macro_f1` if a class is rare in training, else `accuracy`."""
        counts = [count for count in self.target.counts.get("train", ()) if count]
        is_rare = min(counts, default=0) * len(counts) < _RARE * sum(counts)
        return "macro_f1" if is_rare else "accuracy"

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names, or numbers if the classes have no names."""
        return self.target.labels or tuple(map(str, range(self.num_classes)))

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy of labels and logits."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return the loss if all classes have the same probability."""
        return math.log(max(2, self.num_classes))

    def predictions(self, outputs: Any) -> Any:
        """Return the probabilities [n, ..., classes]."""
        return tf.nn.softmax(outputs)

    def predicted(self, outputs: Any) -> Array | None:
        """Return the most likely class of each example or position."""
        result: Array = outputs.argmax(axis=-1)
        return result

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the class numbers, and the log-probabilities of all classes."""
        return labels.astype(np.int64), metrics.log_softmax(outputs)

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, one column per class."""
        return {"logits": outputs, "probabilities": self.predictions(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy of each example [n], in nats."""
        return metrics.losses(labels.astype(np.int64), outputs)


class Sigmoid(Task):
    """A task that predicts one or more binary labels. Outputs are logits."""

    link = "sigmoid"

    def loss(self) -> keras.losses.Loss:
        """Return the binary cross entropy, averaged over the labels."""
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return the loss if all probabilities are 1/2."""
        return math.log(2)

    def predictions(self, outputs: Any) -> Any:
        """Return the probabilities that labels are true, in the shape of the outputs."""
        return tf.sigmoid(outputs)

    def predicted(self, outputs: Any) -> Array | None:
        """Return whether each label is predicted to be true."""
        result: Array = outputs > 0
        return result

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the labels as bools [n, labels], and their logits."""
        yes = labels.reshape(len(labels), -1).astype(bool)
        return yes, outputs[:, : yes.shape[1]]

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, one column per label."""
        return {"logits": outputs, "probabilities": tf.sigmoid(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy of each example [n], averaged over its labels, in nats."""
        yes = labels.reshape(len(labels), -1).astype(bool)
        logits = outputs[:, : yes.shape[1]].astype(np.float64)
        result: Floats = np.logaddexp(0, np.where(yes, -logits, logits)).mean(axis=1)
        return result

    def check_labels(self, labels: Any) -> None:
        """Raise `SplitError` for labels other than 0 and 1."""
        refuse_labels(labels, (labels != 0) & (labels != 1), "which is neither 0 nor 1")


def compute_logit(share: Floats) -> Floats:
    """Convert probabilities to logits, and clip the logits to the range from -`SURE` to `SURE`."""
    with np.errstate(divide="ignore"):
        found: Floats = np.clip(np.log(share) - np.log1p(-share), -SURE, SURE)
    return found


class Classification(Softmax):
    """A task with logits [n, classes] as outputs."""

    name = "classification"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "accuracy": "higher",
        metrics.TOP_NAME: "higher",
        **dict.fromkeys(metrics.AVERAGES, "higher"),
        "macro_auc": "higher",
        "macro_average_precision": "higher",
        "log_loss": "lower",
        "calibration_error": "lower",
    }

    def __init__(self, target: Target) -> None:
        """Require a target with one class number per example."""
        if target.shape or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(f"the label must be one class number per example, not {target}")
        super().__init__(target)
        if 0 < target.num_classes <= metrics.TOP:
            # Leave out the top-k accuracy, which is always 1 for at most k classes.
            known = self.directions.items()
            self.directions = {n: each for n, each in known if n != metrics.TOP_NAME}  # type: ignore[misc]

    def check(self) -> None:
        """Refuse negative labels, splits with only one class, and classes not seen in training."""
        low = self.target.moments.get("min", 0)
        if low < 0:
            raise ConfigError(
                f"the label {self.target} has values from {low:g}, but {self.name} needs class "
                "numbers from 0; use a ClassLabel feature, or set task.name to regression"
            )
        trained = self.target.counts.get("train", ())
        for split, counts in self.target.counts.items():
            self._check_split(split, counts, trained)

    def _check_split(self, split: str, counts: Sequence[int], trained: Sequence[int]) -> None:
        found = [number for number, count in enumerate(counts) if count]
        if len(found) == 1:
            raise ConfigError(
                f"all examples of the split {split!r} have the same {self.target.name!r}, "
                f"{self.labels[found[0]]!r}; the split needs examples of at least two classes"
            )
        if unknown := [self.labels[number] for number in found if not trained[number]]:
            raise ConfigError(
                f"the split {split!r} has examples whose {self.target.name!r} is {unknown[0]!r}, "
                "but the training split has none"
            )

    def check_labels(self, labels: Any) -> None:
        """Raise `SplitError` for a label that is not a class number."""
        wrong = (labels < 0) | (labels >= self.num_classes)
        refuse_labels(labels, wrong, f"which is not between 0 and {self.num_classes - 1}")

    @property
    def output_shape(self) -> Shape:
        """One logit per class."""
        return (self.num_classes,)

    def metrics(self) -> list[keras.Metric]:
        """Return the metrics that a validation computes. An evaluation computes more."""
        return [
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            metrics.MacroF1(self.num_classes),
        ]

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of the true and predicted class, and the probability of the true one."""
        names, probabilities = self.labels, metrics.softmax(output[np.newaxis])[0]
        return {
            "label": names[int(label)],
            "predicted": names[int(output.argmax())],
            "probability": float(probabilities[int(label)]),
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the confusion matrix (one row per true class) and the curves."""
        cells = np.zeros((1, 1))
        for part in examples.parts():
            labels, guess = part.labels.astype(np.int64), part.outputs.argmax(axis=1)
            cells = cells + metrics.confusion(
                labels, guess, self.num_classes, example_weights(part)
            )
        some, names = sample_examples(examples), list(self.labels)
        labels = some.labels.astype(np.int64)
        return {
            "confusion_matrix": metrics.plain_rows(cells),
            "roc": metrics.roc(labels, some.outputs),
            "labels": names,
            "curves": metrics.curves(labels, some.outputs, names),
        }

    def constants(self, examples: Examples) -> list[Constant]:
        """Return the most frequent class, and the class frequencies as constant probabilities."""
        counts = np.zeros(self.num_classes)
        for part in examples.parts():
            labels = part.labels.astype(np.int64)
            counts += np.bincount(labels, example_weights(part), self.num_classes)
        shares, top = counts / counts.sum(), int(counts.argmax())
        return [
            Constant(f"always {self.labels[top]!r}", SURE * (np.arange(len(counts)) == top)),
            Constant("each class as often as it occurs", np.log(np.maximum(shares, np.exp(-SURE)))),
        ]

    def example_values(self, metric: str, part: Part) -> Floats | None:
        """If `metric` is `accuracy`, return 1 (correct) or 0 for each prediction [n], else None."""
        # A subclass that overrides `metrics` may define `accuracy` in another way.
        if metric != "accuracy" or type(self).metrics is not Classification.metrics:
            return None
        right: Floats = (part.outputs.argmax(axis=1) == part.labels).astype(np.float64)
        return right

    def make_test(self, metric: str, part: Part) -> Tested | None:
        """Return a permutation test for a metric that is an average over the classes."""
        if metric not in metrics.AVERAGES:
            return None
        labels, guess = part.labels.astype(np.int64), part.outputs.argmax(axis=1)
        return metrics.make_average_test(metric, labels, guess, example_weights(part))

    def tally(self) -> Tally:
        """Return an accumulator of all metrics in `directions`."""
        return ClassTally(self.labels)
