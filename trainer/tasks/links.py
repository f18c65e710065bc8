"""Links from a model's outputs to probabilities: softmax and sigmoid.

A link defines the loss, the predictions, the answers and their inverse; a task defines its labels
and metrics. `Task` itself has no link: an output is a number.
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

# If a class is rarer in training than this fraction of an equal share, accuracy hardly shows it.
_RARE = 0.2
#: Logit for a share of 0 or 1.
SURE = 20.0
# The number of classes before preparation, for a class label without names.
_SOME_CLASSES = 2


class Softmax(Task):
    """One of several classes: outputs are logits [n, ..., classes]; the loss has a softmax."""

    link = "softmax"

    def __init__(self, target: Target) -> None:
        """Accept a target whose values are class numbers."""
        super().__init__(target)
        self.num_classes = target.num_classes or _SOME_CLASSES

    @property
    def main_metric(self) -> str:
        """The accuracy, or `macro_f1` if a class that occurs in training is rare."""
        counts = [count for count in self.target.counts.get("train", ()) if count]
        is_rare = min(counts, default=0) * len(counts) < _RARE * sum(counts)
        return "macro_f1" if is_rare else "accuracy"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes; their numbers if they have no names."""
        return self.target.labels or tuple(map(str, range(self.num_classes)))

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy of labels and logits."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return the loss of equal probabilities."""
        return math.log(max(2, self.num_classes))

    def predictions(self, outputs: Any) -> Any:
        """Return probabilities [n, ..., classes]."""
        return tf.nn.softmax(outputs)

    def predicted(self, outputs: Any) -> Array | None:
        """Return the likeliest class of each example, or of each position."""
        result: Array = outputs.argmax(axis=-1)
        return result

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the class numbers, and the logarithms of their probabilities."""
        return labels.astype(np.int64), metrics.log_softmax(outputs)

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, with a column per class."""
        return {"logits": outputs, "probabilities": self.predictions(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy [n] in nats."""
        return metrics.losses(labels.astype(np.int64), outputs)


class Sigmoid(Task):
    """One binary label, or one per class: outputs are logits; the loss includes the sigmoid."""

    link = "sigmoid"

    def loss(self) -> keras.losses.Loss:
        """Return the binary cross entropy, a mean over the classes."""
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def chance_loss(self) -> float:
        """Return the loss of a fair coin."""
        return math.log(2)

    def predictions(self, outputs: Any) -> Any:
        """Return the probabilities of true labels, in the shape of the outputs."""
        return tf.sigmoid(outputs)

    def predicted(self, outputs: Any) -> Array | None:
        """Return whether each class is predicted."""
        result: Array = outputs > 0
        return result

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the bool labels of each class, and their logits."""
        yes = labels.reshape(len(labels), -1).astype(bool)
        return yes, outputs[:, : yes.shape[1]]

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, with a column per class."""
        return {"logits": outputs, "probabilities": tf.sigmoid(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy [n] in nats, for outputs in the shape of the labels."""
        yes = labels.reshape(len(labels), -1).astype(bool)
        logits = outputs[:, : yes.shape[1]].astype(np.float64)
        result: Floats = np.logaddexp(0, np.where(yes, -logits, logits)).mean(axis=1)
        return result

    def check_labels(self, labels: Any) -> None:
        """Refuse values other than 0 and 1."""
        refuse_labels(labels, (labels != 0) & (labels != 1), "which is neither 0 nor 1")


def compute_logit(share: Floats) -> Floats:
    """Return the logits of shares, clipped at certainty."""
    with np.errstate(divide="ignore"):
        found: Floats = np.clip(np.log(share) - np.log1p(-share), -SURE, SURE)
    return found
