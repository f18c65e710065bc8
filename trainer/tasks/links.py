"""Tasks whose outputs are linked to probabilities by a softmax or a sigmoid.

These base classes define the loss, the predictions, the answers and their inverse. A subclass
defines its labels and metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.tasks import metrics
from flotilla.trainer.tasks.base import Array, Floats, Target, Task, refuse_labels

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
