"""Multilabel classification: any number of classes per example.

label     [classes] of 0 and 1, or false and true
outputs   logits [n, classes]
loss      binary cross entropy, averaged over the classes
metrics   binary_accuracy; subset_accuracy (all classes of an example must be correct);
          micro_precision, micro_recall and micro_f1; averages over the classes: macro_f1, macro_auc
          and macro_average_precision; calibration_error
answers   `logits` and `probabilities`, one column per class
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import keras
import numpy as np

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
from flotilla.trainer.tasks.exact.tallies import MultilabelTally


class MultilabelClassification(Sigmoid):
    """A task with several binary labels. `task.args` may set `labels`, the class names."""

    name = "multilabel_classification"
    main_metric = "macro_f1"
    directions: ClassVar[Mapping[str, Direction]] = {
        "loss": "lower",
        **dict.fromkeys(("binary_accuracy", "subset_accuracy"), "higher"),
        **dict.fromkeys(("micro_precision", "micro_recall", "micro_f1", "macro_f1"), "higher"),
        **dict.fromkeys(("macro_auc", "macro_average_precision"), "higher"),
        "calibration_error": "lower",
    }

    def __init__(self, target: Target, *, labels: tuple[str, ...] = ()) -> None:
        """Require a vector target with one number or bool per class."""
        kind = "" if target.dtype == "string" else np.dtype(target.dtype).kind
        if len(target.shape) != 1 or target.shape[0] < 0 or kind not in "iubf" or not kind:
            raise ConfigError(f"the label must be a vector of 0 or 1 for each class, not {target}")
        super().__init__(target)
        self._classes = target.shape[0]
        named = tuple(labels) or (target.labels if len(target.labels) == self._classes else ())
        if named and len(named) != self._classes:
            raise ConfigError(f"labels: there are {len(named)} names for {self._classes} classes")
        self._labels = named or tuple(map(str, range(self._classes)))

    @property
    def output_shape(self) -> Shape:
        """One logit per class."""
        return self.target.shape

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names, or numbers if the classes have no names."""
        return self._labels

    def metrics(self) -> list[keras.Metric]:
        """Return the metrics of a validation."""
        return [
            metrics.BinaryAccuracy(name="binary_accuracy"),
            metrics.SubsetAccuracy(),
            metrics.Precision(name="micro_precision"),
            metrics.Recall(name="micro_recall"),
            metrics.F1("micro_f1"),
            metrics.F1("macro_f1", average="macro"),
            metrics.Areas(self._classes, prefix="macro_"),
            metrics.CalibrationError(),
        ]

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the names of the true and the predicted classes."""
        return {
            name: ", ".join(n for n, yes in zip(self._labels, each, strict=True) if yes) or "none"
            for name, each in (("label", label), ("predicted", output > 0))
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the curves of each class that has positive and negative examples."""
        part, curves = sample_examples(examples), []
        for index, name in enumerate(self._labels):
            # Add a logit of 0 for the negative class: softmax([0, x])[1] equals sigmoid(x).
            logits = np.pad(part.outputs[:, index : index + 1], [[0, 0], [1, 0]])
            true = part.labels[:, index].astype(np.int64)
            curves += metrics.curves(true, logits, ["", name])[1:]
        return {"labels": list(self._labels), "curves": curves}

    def tally(self) -> Tally:
        """Return an accumulator of all metrics in `directions`."""
        return MultilabelTally(self._labels)

    def constants(self, examples: Examples) -> list[Constant]:
        """Return the class frequencies, and three sets of classes that may be the best constant."""
        shares = weighted_mean(examples, lambda part: part.labels)
        ordered = -np.sort(-shares)
        # Predicting the j most frequent classes gives a micro F1 of 2 hits / (all + j). Choose j.
        best = np.argmax(np.cumsum(ordered) / (shares.sum() + np.arange(1, len(shares) + 1)))
        rows, counts = np.unique(sample_examples(examples).labels, axis=0, return_counts=True)
        frequent = np.where(shares >= ordered[best], SURE, -SURE)
        return [
            Constant("each class as often as it occurs", compute_logit(shares)),
            Constant("always all classes", np.full(len(shares), SURE)),
            Constant("always the most frequent classes", frequent),
            Constant("always the most frequent row", SURE * (2.0 * rows[counts.argmax()] - 1)),
        ]

    def make_test(self, metric: str, part: Part) -> Tested | None:
        """Return a permutation test of the macro F1."""
        if metric != "macro_f1":
            return None
        true, given, weights = part.labels.astype(bool), part.outputs > 0, example_weights(part)

        def tested(order: Array) -> tuple[float, float]:
            own, weight = true[order], weights[order]
            both = np.maximum(weight @ own + weight @ given, 1e-12)
            return (float(np.mean(2 * (weight @ (own & given)) / both)),) * 2

        return tested

    def check(self) -> None:
        """Refuse labels below 0 or above 1."""
        low, high = (self.target.moments.get(name, 0) for name in ("min", "max"))
        if low < 0 or high > 1:
            raise ConfigError(
                f"the label {self.target} has values from {low:g} to {high:g}, but {self.name} "
                "needs 0 and 1"
            )
