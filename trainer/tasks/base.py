"""The interface of a learning task.

A task defines the loss, the metrics, the meaning of a model's outputs, and what a report shows.
Each kind of task is a subclass.

A model's results have three forms, each computed from the previous form:

    outputs      what the model returns: logits for a classifier, numbers for a regression. If the
                 model returns probabilities, they are converted to logits
    predictions  what metrics accept: probabilities, or the numbers
    answers      what an exported model returns: named columns
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer.runtime.errors import ConfigError, UserError

Direction = Literal["higher", "lower"]
Shape = tuple[int, ...]
Array = npt.NDArray[Any]
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A feature to predict, as the dataset describes it.

    Attributes:
        name: the name of the feature.
        shape: the shape of one example's value: () for a scalar, with -1 for a variable axis.
        dtype: the name of the NumPy type.
        num_classes: the number of classes. It is 0 for a quantity, and until the number is known.
        labels: the names of the classes, if they are known.
        counts: for each split, the number of examples of each class. The mapping is empty if there
            are no classes or the dataset is not prepared yet.
        moments: mean, std, min and max of the values in the training split. The mapping is empty if
            the values are not numbers or the dataset is not prepared yet.
    """

    name: str
    shape: Shape
    dtype: str
    num_classes: int = 0
    labels: tuple[str, ...] = ()
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    moments: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a description for messages."""
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        what = f"one {self.dtype}" if not self.shape else f"{self.dtype} of shape {self.shape}"
        return f"{self.name!r} ({what}{classes})"


class Part(NamedTuple):
    """Some examples in dataset order. The first axis of every array indexes the examples.

    With several targets, `labels` and `outputs` are keyed by target name. `weights` is None if the
    examples are not weighted. `columns` contains the features that slices and the task need.
    """

    labels: Any
    outputs: Any
    weights: Floats | None
    columns: Mapping[str, Array]


class Examples(Protocol):
    """The examples of a split, with a model's outputs for them."""

    @property
    def count(self) -> int:
        """The number of examples."""

    def parts(self) -> Iterator[Part]:
        """Yield all examples in parts that fit into memory. Each call starts from the beginning."""


#: A function from a permutation of the labels to the metric and the test statistic.
Tested = Callable[[npt.NDArray[np.intp]], tuple[float, float]]


class Constant(NamedTuple):
    """A prediction that needs no model.

    `answer` describes the prediction. Without `make`, every example has the same `outputs`. If
    `make` is set, it computes the outputs of a part, for example from each item's popularity.
    """

    answer: str
    outputs: Any
    make: Callable[[Part], Any] | None = None

    def apply(self, part: Part) -> Part:
        """Return the part with its outputs replaced by this prediction."""
        if self.make:
            return part._replace(outputs=self.make(part))
        count = len(tf.nest.flatten(part.labels)[0])
        rows = tf.nest.map_structure(
            lambda each: np.broadcast_to(np.float32(each), (count, *np.shape(each))), self.outputs
        )
        return part._replace(outputs=rows)


@dataclass(frozen=True)
class Whole:
    """Examples that are in memory, as a single part."""

    part: Part

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(tf.nest.flatten(self.part.labels)[0])

    def parts(self) -> Iterator[Part]:
        """Yield all examples as one part."""
        yield self.part


@dataclass(frozen=True)
class LazyExamples:
    """Examples whose parts `make` computes again on each pass."""

    examples: Examples
    make: Callable[[Part], Part]

    @property
    def count(self) -> int:
        """The number of examples."""
        return self.examples.count

    def parts(self) -> Iterator[Part]:
        """Yield the parts that `make` returns."""
        return map(self.make, self.examples.parts())


def example_weights(part: Part) -> Floats:
    """Return the weight of each example [n]. All are 1 if the part has no weights."""
    count = len(tf.nest.flatten(part.labels)[0])
    return np.ones(count) if part.weights is None else np.float64(part.weights).ravel()


def weighted_mean(examples: Examples, values: Callable[[Part], Array]) -> Floats:
    """Apply `values` to each part, and return the weighted mean of the results [n, ...]."""
    total: Any = 0.0
    weight = 0.0
    for part in examples.parts():
        weights = example_weights(part)
        total = total + np.tensordot(weights, np.float64(values(part)), 1)
        weight += weights.sum()
    return np.asarray(total / weight)


class Tally:
    """Accumulates the examples of an evaluation, and computes a task's metrics from them."""

    #: Accumulators that are part of this one, and whose memory use `condense` reduces.
    inner: Sequence[Any] = ()

    def add(self, part: Part) -> None:
        """Add the examples of a part."""

    def condense(self) -> None:
        """Reduce memory use if many examples have been added."""
        for each in self.inner:
            each.condense()

    def result(self) -> dict[str, Any]:
        """Return `metrics`, `intervals` and, for some tasks, other entries of `Task.details`."""
        return {}


def sample_examples(examples: Examples, most: int = 100_000) -> Part:
    """Return at most `most` evenly spaced examples.

    Use the sample for plots and for other results that do not need all examples.
    """
    step = -(-examples.count // most) or 1
    parts, begin = [], 0
    for part in examples.parts():
        rows = slice(begin, None, step)
        size = len(tf.nest.flatten(part.labels)[0])
        begin = (begin - size) % step
        # Copy the rows, because a view would keep the whole part in memory.
        copy_of = lambda each, at=rows: None if each is None else each[at].copy()  # noqa: E731
        parts.append(tf.nest.map_structure(copy_of, part))
    whole: Part = tf.nest.map_structure(
        lambda *each: None if each[0] is None else np.concatenate(each), *parts
    )
    return whole


class SplitError(UserError):
    """Labels or weights of a split are invalid.

    The message completes the sentence "the split has ...".
    """


def refuse_labels(labels: Any, wrong: Any, why: str) -> None:
    """Raise `SplitError` if the mask `wrong` selects a label. The message quotes the first one."""
    found = np.asarray(labels)[wrong]
    if len(found):
        raise SplitError(f"the label {found[0]}, {why}; correct the dataset builder")


class Task(ABC):
    """A learning task for one target."""

    #: The name in reports and models. Built-in tasks have the same name in the configuration.
    name: ClassVar[str]
    #: For each metric of the task, whether higher or lower is better, or None if neither is.
    directions: ClassVar[Mapping[str, Direction | None]]
    #: The function that converts outputs to probabilities. Empty if there are no probabilities.
    link: ClassVar[Literal["", "softmax", "sigmoid"]] = ""
    #: Whether the model returns probabilities, which `outputs` converts to logits.
    from_probabilities = False
    #: Whether outputs are in the label's units. If so, training can start at the label's mean.
    in_units = False
    #: How to choose which of two classes is positive if the configuration does not: `rarity`
    #: chooses the rarer class, and `order` the second one. Empty if the task has no positive class.
    positive_by: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        """Store the target. A subclass may check it, and accept `task.args` as keywords."""
        self.target = target

    @property
    @abstractmethod
    def output_shape(self) -> Shape:
        """The shape of a model's output for one example, with -1 for an axis of any size."""

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric that selects and compares models if the configuration names none.

        The choice may depend on the class counts of the training split (`target.counts`).
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """The class names, one per column of the probabilities. Empty if there are no classes."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The features, besides the label, that the task reads from `Part.columns`."""
        return ()

    @property
    def learns(self) -> tuple[str, ...]:
        """The features of training examples that `learn` reads."""
        return ()

    @property
    def unit(self) -> str:
        """The feature that groups dependent examples, such as a query id, or "" if none does."""
        return ""

    @abstractmethod
    def loss(self) -> keras.losses.Loss:
        """Return the Keras loss, which compares labels with outputs."""

    def loss_labels(self, labels: Any) -> Any:
        """Convert labels to the units of the outputs, for a loss that the user chose."""
        return labels

    @abstractmethod
    def chance_loss(self) -> float:
        """Return the loss of an uninformed guess.

        A training loss far above this value indicates divergence.
        """

    @abstractmethod
    def metrics(self) -> list[keras.Metric]:
        """Return the metrics of labels and predictions, named as in `directions`.

        The state of each metric must be a sum over examples, as in Keras, because the states of all
        workers are added. In an evaluation, the tally of a built-in task computes these metrics
        instead (`tallies.py`).
        """

    @property
    def parts(self) -> Mapping[str, Task]:
        """The task of each output, keyed by output name. A single output has an empty name."""
        return {"": self}

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """The weight of each output in the total loss, by output name. The default weight is 1."""
        return {}

    def set_thresholds(self, thresholds: Mapping[str, Any]) -> Task:
        """Return this task with the given decision thresholds, which are keyed by output name."""
        if "" not in thresholds:
            return self
        found = copy.copy(self)
        found.threshold = thresholds[""]  # type: ignore[attr-defined]
        return found

    def outputs(self, given: Any) -> Any:
        """Convert the values that the model returns, such as probabilities, to outputs."""
        if not self.from_probabilities:
            return given
        least = keras.config.epsilon()
        p = tf.clip_by_value(given, least, 1 - least)
        return tf.math.log(p) - tf.math.log1p(-p) if self.link == "sigmoid" else tf.math.log(p)

    def given(self, outputs: Any) -> Any:
        """Convert outputs back to the values that the model returns and its loss accepts."""
        return self.predictions(outputs) if self.from_probabilities else outputs

    def predictions(self, outputs: Any) -> Any:
        """Convert outputs to the predictions that metrics accept."""
        return outputs

    def predicted(self, outputs: Any) -> Array | None:  # noqa: ARG002
        """Return the predicted classes, or None for a task without classes.

        They are class numbers [n] or [n, positions], or bools [n, classes] if an example may have
        several classes.
        """
        return None

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the true labels and the scores [n, columns] for the AUC metrics.

        The labels are bools [n, columns], or integers [n]: the index of each example's true column.
        """
        raise NotImplementedError(f"{self.name} has no AUC metrics")

    @abstractmethod
    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the columns that an exported model returns, keyed by column name."""

    @abstractmethod
    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Convert the answers of an exported champion back to outputs."""

    @abstractmethod
    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the loss of each example [n]. The report lists the highest losses."""

    @abstractmethod
    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the cells of an example's row in the report: `label`, `predicted`, and others."""

    def details(self, examples: Examples) -> dict[str, Any]:  # noqa: ARG002
        """Return further results of an evaluation, as plain data.

        The entries `metrics` and `intervals` are added to the task's other metrics. The report
        draws `confusion_matrix` with `labels`, `per_class`, `calibration` and `curves` (see
        `flotilla.trainer.tasks.classification`), and for any task:

            tables   [{"title", "columns": [text], "rows": [[value]]}]
            charts   [{"title", "x", "y", "series": {label: [[x, y]]}}]
        """
        return {}

    def tally(self) -> Tally:
        """Return an empty accumulator for an evaluation, or for one of its slices.

        For a built-in task, an evaluation uses the metrics of the accumulator instead of
        `metrics()`.
        """
        return Tally()

    def constants(self, examples: Examples) -> list[Constant]:  # noqa: ARG002
        """Return constant predictions that are fitted to the labels of these examples.

        The gate compares a model with the best of them.
        """
        return []

    def make_test(self, metric: str, part: Part) -> Tested | None:  # noqa: ARG002
        """Return a function for the permutation test of a metric against a constant.

        The test calls the function hundreds of times. If this method returns None, the caller
        compares the metric example by example instead.
        """
        return None

    def example_values(self, metric: str, part: Part) -> Floats | None:  # noqa: ARG002
        """Return one value per example [n], whose mean is the metric, or None if not supported.

        If the result is None, the caller computes the metric's state for each example. This takes
        about a hundred times as long.
        """
        return None

    def group_values(self, metric: str, examples: Examples) -> Floats | None:  # noqa: ARG002
        """Return one value per query, whose mean is the metric, or None if not supported."""
        return None

    def learn(self, training: Iterable[Mapping[str, Array]]) -> None:  # noqa: B027
        """Collect statistics for `constants` from batches of the features in `learns`."""

    def check(self) -> None:  # noqa: B027
        """Raise `ConfigError` if the task does not support the prepared dataset.

        This runs before a cluster starts, when `target.counts` and `target.moments` are known.
        """

    def check_labels(self, labels: Any) -> None:  # noqa: B027
        """Raise `SplitError` if the task cannot evaluate a label."""

    def check_output(self, output: Any, last: Any) -> None:
        """Raise `ConfigError` if a model's symbolic output or its last layer does not fit."""
        if not isinstance(output, keras.KerasTensor):
            raise ConfigError(f"the output must be one tensor, not a {type(output).__name__}")
        wanted = (None, *(None if size < 0 else size for size in self.output_shape))
        shape = tuple(output.shape)
        fits = len(shape) == len(wanted) and all(
            size is None or size == found for size, found in zip(wanted, shape, strict=True)
        )
        if not fits or "float" not in output.dtype:
            sizes = ", ".join(["batch", *("any" if n < 0 else str(n) for n in self.output_shape)])
            raise ConfigError(
                f"the output must be floats of shape ({sizes}) for {self.name} of {self.target}, "
                f"not {output.dtype} of shape {shape}"
            )
        self._check_activation(find_activation(last))

    def _check_activation(self, activation: str) -> None:
        """Require that the last layer returns what the loss expects: logits or probabilities."""
        if not self.link:
            return
        if self.from_probabilities and activation in {"linear", "dense"}:
            raise ConfigError(
                "the loss needs probabilities, but the last layer returns logits; add a "
                f"{self.link} to that layer, or compile the model with from_logits=True in the loss"
            )
        if activation == "softmax" and self.output_shape[-1:] == (1,):
            raise ConfigError(
                "the last layer is a softmax of one column, which is always 1; use Dense(1) instead"
            )
        if not self.from_probabilities and activation == self.link:
            raise ConfigError(
                f"the model must return logits; remove the {self.link} from its last layer, or "
                "compile the model with a loss that needs probabilities"
            )


def last_layers(model: keras.Model) -> Any:
    """Return the operation that computes each output, in the structure of the outputs.

    For a model that is not functional, return its last layer, or None if it has no layers.
    """
    graph = getattr(model, "_functional", None) or model
    outputs = getattr(graph, "_outputs_struct", None)
    if outputs is None:
        return model.layers[-1] if model.layers else None
    return keras.tree.map_structure(lambda each: each._keras_history.operation, outputs)


def find_activation(layer: Any) -> str:
    """Return the name of a layer's activation, or of the activation in the last layer of a model.

    Without an activation, return the name of the layer's class in lower case. The name is empty if
    there is no single last layer.
    """
    while isinstance(layer, keras.Model):
        found = last_layers(layer)
        layer = None if keras.tree.is_nested(found) else found
    function = getattr(layer, "activation", None)
    if function is not None:
        return str(getattr(function, "__name__", ""))
    return type(layer).__name__.lower() if layer is not None else ""
