"""Classification of sequences: one class for the sequence, or one for each position.

`sequence_to_label` is `classification` of padded inputs. The model must consume the mask of an
embedding (`mask_zero`) itself, in a recurrent or pooling layer.

`sequence_labelling`:

    label     class numbers [positions], or [height, width, 1] for a segmented image. Positions with
              negative numbers are padding, which is ignored
    outputs   logits [n, positions, classes]; if Keras attaches a mask to them, the training loss
              leaves out masked positions
    loss      cross entropy, averaged over the positions of an example and then over examples, so
              that the weight of an example depends neither on its length nor on its batch
    metrics   accuracy (of positions), example_accuracy (all positions are correct), macro_f1
    answers   `logits` and `probabilities`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    Tested,
    example_weights,
    refuse_labels,
)
from flotilla.trainer.tasks.classification import SURE, Classification, Softmax
from flotilla.trainer.tasks.tallies import PositionTally

_MOST_PLACES = 12


class SequenceToLabel(Classification):
    """Classification of a whole sequence. See the module docstring."""

    name = "sequence_to_label"

    def check_output(self, output: Any, last: Any) -> None:
        """Refuse outputs that have logits for each position."""
        shape = tuple(getattr(output, "shape", ()))
        if len(shape) > len((None, *self.output_shape)):
            raise ConfigError(
                f"the output of shape {shape} has a row for each position; end it with a pooling "
                "layer or return_sequences=False, or set task.name to sequence_labelling"
            )
        super().check_output(output, last)


class PlaceLoss(keras.losses.Loss):
    """The cross entropy of an example, averaged over its labeled positions."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> tf.Tensor:
        """Return the mean loss of the examples. Weights are [n] or [n, positions]."""
        labels, logits = places(y_true), places(y_pred, classes=True)
        known = tf.cast(labels >= 0, tf.float32)
        mask = getattr(y_pred, "_keras_mask", None)
        if mask is not None:
            known *= tf.cast(places(mask), tf.float32)
        each = known * tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.maximum(labels, 0), tf.cast(logits, tf.float32)
        )
        weights = None if sample_weight is None else tf.cast(sample_weight, tf.float32)
        if weights is not None and weights.shape.rank > 1:
            each, weights = each * places(weights), None
        losses = tf.math.divide_no_nan(tf.reduce_sum(each, axis=1), tf.reduce_sum(known, axis=1))
        return super().__call__(losses, losses, weights)

    def call(self, y_true: Any, y_pred: Any) -> tf.Tensor:  # noqa: ARG002
        """Return `y_pred`, in which `__call__` passes the losses [n]."""
        return y_pred


def places(values: Any, *, classes: bool = False) -> tf.Tensor:
    """Flatten the positions of each example to [n, positions], or [n, positions, classes]."""
    last = [values.shape[-1]] if classes else []
    sizes = values.shape[1:-1] if classes else values.shape[1:]
    # Compute the count at run time if a size varies between batches and has no static value.
    count = (
        tf.reduce_prod(tf.shape(values)[1 : values.shape.rank - classes])
        if None in sizes
        else math.prod(sizes)
    )
    found = tf.reshape(values, [tf.shape(values)[0], count, *last])
    return found if classes or found.dtype.is_floating else tf.cast(found, tf.int32)


class PlaceMetrics(metrics.MacroF1):
    """The metrics `accuracy` and `macro_f1` of positions, and `example_accuracy`."""

    def __init__(self, classes: int) -> None:
        """Create the metrics for this number of classes."""
        super().__init__(classes, name="places")
        self.all_right = self.add_weight(name="all_right", initializer="zeros")
        self.weight = self.add_weight(name="weight", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch."""
        super().update_state(y_true, y_pred, sample_weight)
        labels = places(y_true)
        found = tf.argmax(places(y_pred, classes=True), axis=2, output_type=tf.int32)
        given = tf.ones_like(labels[:, 0]) if sample_weight is None else sample_weight
        weight = tf.cast(given, self.dtype)
        right = tf.reduce_all((labels == found) | (labels < 0), axis=1)
        self.all_right.assign_add(tf.reduce_sum(weight * tf.cast(right, self.dtype)))
        self.weight.assign_add(tf.reduce_sum(weight))

    def result(self) -> dict[str, tf.Tensor]:
        """Return the three metrics, keyed by name."""
        right, either = map(tf.convert_to_tensor, (self.right, self.either))
        return {
            "accuracy": 2 * tf.reduce_sum(right) / tf.reduce_sum(either),
            "macro_f1": super().result(),
            "example_accuracy": tf.convert_to_tensor(self.all_right) / self.weight,
        }


class SequenceLabelling(Softmax):
    """Classification of each position. See the module docstring."""

    name = "sequence_labelling"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        "accuracy": "higher",
        "example_accuracy": "higher",
        "macro_f1": "higher",
    }

    def __init__(self, target: Target) -> None:
        """Require a target with one class number per position."""
        if not target.shape or np.dtype(target.dtype).kind not in "iub":
            raise ConfigError(f"the label must be a class number for each position, not {target}")
        super().__init__(target)

    @property
    def output_shape(self) -> Shape:
        """One logit per position and class."""
        *most, last = self.target.shape
        return (
            (*most, self.num_classes) if last in {0, 1} else (*self.target.shape, self.num_classes)
        )

    def loss(self) -> keras.losses.Loss:
        """Return the cross entropy of the positions."""
        return PlaceLoss(name="places")

    def metrics(self) -> list[keras.Metric]:
        """Return the metrics in `directions`."""
        return [PlaceMetrics(self.num_classes)]

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy of each example [n], averaged over its positions."""
        flat = labels.reshape(len(labels), -1).astype(np.int64)
        logits = outputs.reshape(-1, self.num_classes)
        each = super().example_losses(np.maximum(flat, 0).ravel(), logits).reshape(flat.shape)
        known = flat >= 0
        result: Floats = (each * known).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        return result

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the first labels and predictions, and the fraction of correct predictions."""
        true, found = label.ravel(), output.argmax(axis=-1).ravel()
        known = true >= 0
        return {
            "label": self._text(true[known]),
            "predicted": self._text(found[known]),
            "accuracy": float((true == found)[known].mean()) if known.any() else 1.0,
        }

    def _text(self, numbers: Array) -> str:
        names = " ".join(self.labels[int(each)] for each in numbers[:_MOST_PLACES])
        return f"{names} ..." if len(numbers) > _MOST_PLACES else names

    def constants(self, examples: Examples) -> list[Constant]:
        """Return the most frequent class overall and by position, and the class frequencies."""
        counts: Floats = np.zeros(1)
        for part in examples.parts():
            labels = part.labels.reshape(len(part.labels), -1).astype(np.int64)
            known = (labels >= 0) * example_weights(part)[:, np.newaxis]
            cells = np.maximum(labels, 0) + self.num_classes * np.arange(labels.shape[1])
            size = self.num_classes * labels.shape[1]
            counts = counts + np.bincount(cells.ravel(), known.ravel(), size)
            shape = part.outputs.shape[1:]
        by_place = counts.reshape(-1, self.num_classes)
        # Avoid a division by zero: positions that are always padding have no labels.
        shares = (by_place + 1e-9) / (by_place + 1e-9).sum(axis=1, keepdims=True)
        likeliest = shares == shares.max(axis=1, keepdims=True)
        top = int(by_place.sum(axis=0).argmax())
        rows = {
            f"always {self.labels[top]!r}": SURE * (np.arange(self.num_classes) == top),
            "the most frequent class of each position": SURE * likeliest,
            "each class as often as it occurs at a position": np.log(shares),
        }
        return [
            Constant(answer, np.broadcast_to(row, by_place.shape).reshape(shape))
            for answer, row in rows.items()
        ]

    def make_test(self, metric: str, part: Part) -> Tested | None:
        """Return a permutation test of the macro F1."""
        if metric != "macro_f1":
            return None
        found = part.outputs.argmax(axis=-1).reshape(len(part.labels), -1)
        labels = part.labels.reshape(found.shape).astype(np.int64)
        return metrics.make_average_test(
            metric, labels, found, example_weights(part)[:, np.newaxis]
        )

    def details(self, examples: Examples) -> dict[str, Any]:  # noqa: ARG002
        """Return the class names."""
        return {"labels": list(self.labels)}

    def tally(self) -> Tally:
        """Return an accumulator for metrics of positions."""
        return PositionTally(self.labels)

    def check_labels(self, labels: Any) -> None:
        """Raise `SplitError` for a label that is neither a class nor padding."""
        last = self.num_classes - 1
        refuse_labels(labels, labels > last, f"which is not between 0 and {last}")

    def check(self) -> None:
        """Refuse a split without labels."""
        for split, counts in self.target.counts.items():
            if not sum(counts):
                raise ConfigError(f"the split {split!r} has no label of {self.target.name!r}")
