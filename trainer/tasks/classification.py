"""Classification of examples: one class, one of two classes, or any number of classes.

`Softmax` and `Sigmoid` define the loss, the predictions, the answers and their inverse. A subclass
defines its labels and metrics.

`classification`:

    label     a class number
    outputs   logits [n, classes]
    loss      cross entropy
    metrics   accuracy, top_3_accuracy; averages over the classes: macro and weighted precision,
              recall and f1, macro_auc, macro_average_precision; log_loss, calibration_error
    answers   `logits` and `probabilities`, one column per class

`binary_classification`:

    label     true or false, 0 or 1, or one of two named classes. Class 1 is positive; see
              `flotilla.trainer.tasks.registry.set_positive`
    outputs   logits [n, 1] of the positive class
    loss      binary cross entropy
    metrics   accuracy, precision, recall and f1 of the positive class at a probability threshold,
              which is 0.5 until an evaluation chooses one; auc, average_precision, log_loss,
              brier_score, calibration_error
    answers   `logit` and `probability` of the positive class

`multilabel_classification`:

    label     [classes] of 0 and 1, or false and true
    outputs   logits [n, classes]
    loss      binary cross entropy, averaged over the classes
    metrics   binary_accuracy; subset_accuracy (all classes of an example must be correct);
              micro_precision, micro_recall and micro_f1; averages over the classes: macro_f1,
              macro_auc and macro_average_precision; calibration_error
    answers   `logits` and `probabilities`, one column per class
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import metrics
from flotilla.trainer.tasks.areas import Areas, rank_scores
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
    weighted_mean,
)
from flotilla.trainer.tasks.tallies import BinaryTally, ClassTally, MultilabelTally

TWO = 2
# Below this fraction of positives in training, the area under the ROC curve is uninformative.
_RARE_POSITIVE = 0.1
# If the frequency of the rarest class is below this fraction of 1 / classes, accuracy is not a
# suitable main metric.
_RARE = 0.2
#: Logit that represents a probability of 1. Its negative represents 0.
SURE = 20.0


class _Logits(Task):
    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return `logits` and `probabilities`, one column per class or label."""
        return {"logits": outputs, "probabilities": self.predictions(outputs)}

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the logits."""
        return answers["logits"]


class Softmax(_Logits):
    """A task that predicts one of several classes. Outputs are logits [n, ..., classes]."""

    link = "softmax"

    def __init__(self, target: Target) -> None:
        """Store a target whose values are class numbers."""
        super().__init__(target)
        # Before preparation, assume two classes if the dataset does not declare their number.
        self.num_classes = target.num_classes or TWO

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

    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the cross entropy of each example [n], in nats."""
        return metrics.losses(labels.astype(np.int64), outputs)


class Sigmoid(_Logits):
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
        return "average_precision" if sum(counts[1:]) < _RARE_POSITIVE * sum(counts) else "auc"

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
