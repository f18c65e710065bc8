"""Classification with one class per example. The label is the class number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import metrics
from flotilla.trainer.tasks.base import (
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
    sample_examples,
)
from flotilla.trainer.tasks.exact.tallies import ClassTally
from flotilla.trainer.tasks.links import SURE, Softmax


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
