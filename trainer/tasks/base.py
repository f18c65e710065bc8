"""The interface of a learning task.

A task defines the loss, the metrics, the meaning of a model's outputs, and their report. Each
subclass is one kind of task; the other packages work with any of them.

A model's results have three forms, each computed from the one before:

    outputs      what the model returns: logits of a classifier, numbers of a regression;
                 of a model whose loss takes probabilities, the logits of what it returns
    predictions  what metrics take: probabilities, or the numbers
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
        shape: the shape of one example's value; empty for a scalar, -1 for a variable size.
        dtype: the name of its type in NumPy.
        num_classes: the number of classes; 0 for a quantity.
        labels: the names of the classes, if any.
        counts: the examples of each class by split; empty without classes, or before preparation.
        moments: mean, std, min and max over the training split; empty before preparation.
    """

    name: str
    shape: Shape
    dtype: str
    num_classes: int = 0
    labels: tuple[str, ...] = ()
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    moments: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Describe the target for a message."""
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        what = f"one {self.dtype}" if not self.shape else f"{self.dtype} of shape {self.shape}"
        return f"{self.name!r} ({what}{classes})"


class Part(NamedTuple):
    """Some examples in the order of the dataset; the first axis of each array is the examples.

    With several targets, `labels` and `outputs` are mappings by name. `weights` is None if all
    weights are equal. `columns` has the features of slices and those that the task needs.
    """

    labels: Any
    outputs: Any
    weights: Floats | None
    columns: Mapping[str, Array]


class Examples(Protocol):
    """Any number of examples of a split, with a model's outputs."""

    @property
    def count(self) -> int:
        """The number of examples."""

    def parts(self) -> Iterator[Part]:
        """Yield all examples in parts that fit into memory; may be called again."""


#: A function from a permutation of the labels to a metric and a test statistic against chance.
Tested = Callable[[npt.NDArray[np.intp]], tuple[float, float]]


class Constant(NamedTuple):
    """A prediction that ignores the inputs, described by `answer`, with `outputs` for one example.

    If `make` is set, it computes the outputs of a part from its columns and training statistics.
    """

    answer: str
    outputs: Any
    make: Callable[[Part], Any] | None = None

    def apply(self, part: Part) -> Part:
        """Return a part with these outputs."""
        if self.make:
            return part._replace(outputs=self.make(part))
        count = len(tf.nest.flatten(part.labels)[0])
        rows = tf.nest.map_structure(
            lambda each: np.broadcast_to(np.float32(each), (count, *np.shape(each))), self.outputs
        )
        return part._replace(outputs=rows)


@dataclass(frozen=True)
class Whole:
    """Examples in one part; see `Examples`."""

    part: Part

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(tf.nest.flatten(self.part.labels)[0])

    def parts(self) -> Iterator[Part]:
        """Read all examples."""
        yield self.part


@dataclass(frozen=True)
class LazyExamples:
    """Examples whose parts are computed at each pass; see `Examples`."""

    examples: Examples
    make: Callable[[Part], Part]

    @property
    def count(self) -> int:
        """The number of examples."""
        return self.examples.count

    def parts(self) -> Iterator[Part]:
        """Read all examples."""
        return map(self.make, self.examples.parts())


def example_weights(part: Part) -> Floats:
    """Return the weight of each example [n]; 1 if all are equal."""
    count = len(tf.nest.flatten(part.labels)[0])
    return np.ones(count) if part.weights is None else np.float64(part.weights).ravel()


def weighted_mean(examples: Examples, values: Callable[[Part], Array]) -> Floats:
    """Return the weighted mean over the examples of values [n, ...]."""
    total: Any = 0.0
    weight = 0.0
    for part in examples.parts():
        weights = example_weights(part)
        total = total + np.tensordot(weights, np.float64(values(part)), 1)
        weight += weights.sum()
    return np.asarray(total / weight)


class Tally:
    """Sums over parts of the examples, from which a task computes metrics."""

    def add(self, part: Part) -> None:
        """Add some examples."""

    def condense(self) -> None:
        """Reduce the memory of the accumulator when it holds many examples."""

    def result(self) -> dict[str, Any]:
        """Return `metrics` and `intervals` by name, and possibly entries of `details`."""
        return {}


def sample_examples(examples: Examples, most: int = 100_000) -> Part:
    """Return all examples; of more than `most`, every second, third and so on, for plots.

    Metrics use all examples.
    """
    step = -(-examples.count // most) or 1
    parts, begin = [], 0
    for part in examples.parts():
        rows = slice(begin, None, step)
        size = len(tf.nest.flatten(part.labels)[0])
        begin = (begin - size) % step
        parts.append(tf.nest.map_structure(lambda each, at=rows: _slice(each, at), part))
    whole: Part = tf.nest.map_structure(
        lambda *each: None if each[0] is None else np.concatenate(each), *parts
    )
    return whole


def _slice(values: Any, rows: slice) -> Any:
    # A view would keep the whole part in memory.
    return None if values is None else values[rows].copy()


class SplitError(UserError):
    """The examples of a split cannot be measured; the message describes the split."""


def refuse_labels(labels: Any, wrong: Any, why: str) -> None:
    """Raise `SplitError` with the first wrong label, if any."""
    found = np.asarray(labels)[wrong]
    if len(found):
        raise SplitError(f"the label {found[0]}, {why}; correct its builder")


class Task(ABC):
    """One learning task for one target."""

    #: The value of `task.name`; for a user's task, the name in reports and models.
    name: ClassVar[str]
    #: For each metric of the task, whether higher or lower is better; None if neither is.
    directions: ClassVar[Mapping[str, Direction | None]]
    #: The function from outputs to probabilities; empty if the task predicts no probability.
    link: ClassVar[Literal["", "softmax", "sigmoid"]] = ""
    #: Whether the model returns probabilities; its outputs are their logits.
    from_probabilities = False
    #: Whether outputs are in the label's units, so that a model may start at the label's mean.
    in_units = False
    #: The rule that chooses the positive class of two if none is named: `rarity`, or `order` for
    #: the second class; empty if there is none.
    positive_by: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        """Store a target, or raise `ConfigError`; further arguments are `task.args`."""
        self.target = target

    @property
    @abstractmethod
    def output_shape(self) -> Shape:
        """The required shape of a model's output for one example; -1 for any size."""

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric that selects and compares models if the configuration names none.

        It may depend on the training examples: `target.counts`.
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, one per column of the probabilities; empty without classes."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Features that `details` reads from the `columns` of a `Part`, besides the label."""
        return ()

    @property
    def learns(self) -> tuple[str, ...]:
        """Features of the training examples from which `constants` are computed."""
        return ()

    @property
    def unit(self) -> str:
        """The column that identifies dependent examples, such as those of a query; or empty."""
        return ""

    @abstractmethod
    def loss(self) -> keras.losses.Loss:
        """Return the loss of labels and outputs."""

    def loss_labels(self, labels: Any) -> Any:
        """Convert labels for a user's loss: to the units of the outputs."""
        return labels

    @abstractmethod
    def chance_loss(self) -> float:
        """Return the loss of a blind guess; a training loss far above it means divergence."""

    @abstractmethod
    def metrics(self) -> list[keras.Metric]:
        """Return metrics of labels and predictions, by the names of `directions`.

        The state of each metric must be sums over the examples, as in Keras: the states of workers
        are added. In an evaluation, the tally of a built-in task (`exact/tallies.py`) computes the
        same metrics.
        """

    @property
    def parts(self) -> Mapping[str, Task]:
        """The tasks of the outputs by name; a single output is this task, without a name."""
        return {"": self}

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """The weight of each of `parts` in the total loss; 1 for those not named."""
        return {}

    def set_thresholds(self, thresholds: Mapping[str, Any]) -> Task:
        """Return this task with decision thresholds for the parts that use one."""
        if "" not in thresholds:
            return self
        found = copy.copy(self)
        found.threshold = thresholds[""]  # type: ignore[attr-defined]
        return found

    def outputs(self, given: Any) -> Any:
        """Convert the model's return value, which may be probabilities, to outputs."""
        if not self.from_probabilities:
            return given
        least = keras.config.epsilon()
        p = tf.clip_by_value(given, least, 1 - least)
        return tf.math.log(p) - tf.math.log1p(-p) if self.link == "sigmoid" else tf.math.log(p)

    def given(self, outputs: Any) -> Any:
        """Convert outputs to the values that the model returns and its loss takes."""
        return self.predictions(outputs) if self.from_probabilities else outputs

    def predictions(self, outputs: Any) -> Any:
        """Convert a model's outputs to the predictions that metrics take."""
        return outputs

    def predicted(self, outputs: Any) -> Array | None:
        """Return the predicted class; None for a task without classes.

        The result is a number [n], or one for each position [n, positions]; for several classes at
        once, it is bools [n, classes].
        """
        del outputs
        return None

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the true labels and the scores [n, columns] for the AUC metrics.

        The labels are bools [n, columns], or numbers [n] of the true column.
        """
        raise NotImplementedError(f"{self.name} has no AUC metrics")

    @abstractmethod
    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the answers of an exported model: columns by name."""

    @abstractmethod
    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Convert `answers` back to outputs, for an exported champion."""

    @abstractmethod
    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the loss [n] of each example; a report shows the highest ones."""

    @abstractmethod
    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the cells that describe one example: `label`, `predicted`, and more."""

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return further results of an evaluation besides the metrics, as plain data.

        `metrics` and `intervals` are added to those of `metrics()`. The report draws
        `confusion_matrix` with `labels`, `per_class`, `calibration` and `curves` (see
        `flotilla.trainer.tasks.classification`), and for any task

            tables   [{"title", "columns": [text], "rows": [[value]]}]
            charts   [{"title", "x", "y", "series": {label: [[x, y]]}}]
        """
        del examples
        return {}

    def tally(self) -> Tally:
        """Return an accumulator for all examples of an evaluation, or for a slice.

        For a built-in task, its values replace those of `metrics`.
        """
        return Tally()

    def constants(self, examples: Examples) -> list[Constant]:
        """Return candidates for the best constant prediction; see `Constant`.

        They are computed from the labels of these examples, so that no other constant is better.
        """
        del examples
        return []

    def make_test(self, metric: str, part: Part) -> Tested | None:
        """Return a function that recomputes a metric of few examples many times.

        It returns None for a metric that is compared with a constant by example.
        """
        del metric, part
        return None

    def example_values(self, metric: str, part: Part) -> Floats | None:
        """Return the values [n] whose mean is a metric; None if its state is needed.

        Computing the state of each example separately takes a hundred times as long.
        """
        del metric, part
        return None

    def group_values(self, metric: str, examples: Examples) -> Floats | None:
        """Return the values per query whose mean is a metric; None for other metrics."""
        del metric, examples
        return None

    def learn(self, training: Iterable[Mapping[str, Array]]) -> None:  # noqa: B027
        """Collect statistics for constants from the `learns` of training examples, in batches."""

    def check(self) -> None:  # noqa: B027
        """Raise `ConfigError` if the prepared dataset does not suit the task.

        This runs before a cluster starts, with `target.counts` and `target.moments` known.
        """

    def check_labels(self, labels: Any) -> None:  # noqa: B027
        """Raise `SplitError` for labels that cannot be measured."""

    def check_output(self, output: Any, last: Any) -> None:
        """Refuse a model's symbolic output, or its last layer, if it does not fit the task.

        Raises:
            ConfigError: the output does not fit; the message says what is required.
        """
        if not isinstance(output, keras.KerasTensor):
            raise ConfigError(f"its output is a {type(output).__name__}, not one tensor")
        wanted = (None, *(None if size < 0 else size for size in self.output_shape))
        shape = tuple(output.shape)
        fits = len(shape) == len(wanted) and all(
            size is None or size == found for size, found in zip(wanted, shape, strict=True)
        )
        if not fits or "float" not in output.dtype:
            sizes = ", ".join(["batch", *("any" if n < 0 else str(n) for n in self.output_shape)])
            raise ConfigError(
                f"its output must be floats of shape ({sizes}) for {self.name} of {self.target}, "
                f"not {output.dtype} of shape {shape}"
            )
        self._check_activation(find_activation(last))

    def _check_activation(self, activation: str) -> None:
        """Refuse a last layer of logits with a loss of probabilities, and vice versa."""
        if not self.link:
            return
        if self.from_probabilities and activation in {"linear", "dense"}:
            raise ConfigError(
                f"its loss takes probabilities, and its last layer gives logits: add a {self.link} "
                "to it, or compile it with a loss of from_logits=True"
            )
        if activation == "softmax" and self.output_shape[-1:] == (1,):
            raise ConfigError(
                "its last layer is a softmax of one column, which is always 1; end it with Dense(1)"
            )
        if not self.from_probabilities and activation == self.link:
            raise ConfigError(
                f"it must return logits; remove the {self.link} from its last layer, or compile "
                "it with a loss that takes probabilities"
            )


def last_layers(model: keras.Model) -> Any:
    """Return the operation that creates each output, in the structure of the outputs.

    If a model is not a graph of layers, return its last layer.
    """
    graph = getattr(model, "_functional", None) or model
    outputs = getattr(graph, "_outputs_struct", None)
    if outputs is None:
        return model.layers[-1] if model.layers else None
    return keras.tree.map_structure(lambda each: each._keras_history.operation, outputs)


def find_activation(layer: Any) -> str:
    """Return the name of the activation at the end of a layer; empty if it is unknown."""
    while isinstance(layer, keras.Model):
        found = last_layers(layer)
        layer = None if keras.tree.is_nested(found) else found
    function = getattr(layer, "activation", None)
    if function is not None:
        return str(getattr(function, "__name__", ""))
    return type(layer).__name__.lower() if layer is not None else ""
