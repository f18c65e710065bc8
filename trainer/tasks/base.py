"""The interface of a learning task.

A task defines the meaning of a label: the loss, the metrics, the meaning of a model's outputs, and
their report. Each subclass is one kind of task; the rest of this package works with any of them.

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
        name: name of the feature.
        shape: shape of one example's value; empty for a scalar, -1 for a variable size.
        dtype: NumPy's name of its type.
        num_classes: number of classes; 0 for a quantity.
        labels: names of the classes, if they have names.
        counts: examples of each class by split; empty without classes, or before preparation.
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
    """Some examples, in the order of the dataset: arrays whose first axis is the examples.

    With several targets `labels` and `outputs` are mappings by name. `weights` is None if all
    weights are equal. `columns` are the features of slices, and those that the task needs.
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
        """Read all examples in parts that fit into memory; may be called again."""


#: Function of an order of the labels: returns a metric, and a test statistic against chance.
Tested = Callable[[npt.NDArray[np.intp]], tuple[float, float]]


class Constant(NamedTuple):
    """A prediction that ignores the inputs: `answer` describes it, `outputs` are for one example.

    With `make` the outputs are computed for a part, from its columns and training statistics.
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
    """Examples that are one part: see `Examples`."""

    part: Part

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(tf.nest.flatten(self.part.labels)[0])

    def parts(self) -> Iterator[Part]:
        """Read all examples."""
        yield self.part


@dataclass(frozen=True)
class Remade:
    """Examples whose parts are computed on each pass: see `Examples`."""

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
    """Return the weight of each example [n]: 1 if all are equal."""
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
    """Return all examples, or above `most` every second, third, ..., for plots.

    Metrics use all examples instead.
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
    """Raise `SplitError` with the first wrong label, if there is one."""
    found = np.asarray(labels)[wrong]
    if len(found):
        raise SplitError(f"the label {found[0]}, {why}; correct its builder")


class Task(ABC):
    """One learning task for one target."""

    #: The value of `task.name`; for a user's task, the name in reports and models.
    name: ClassVar[str]
    #: For each metric of the task, whether higher or lower is better; None if neither is.
    directions: ClassVar[Mapping[str, Direction | None]]
    #: The function from outputs to probabilities; empty if no prediction is a probability.
    link: ClassVar[Literal["", "softmax", "sigmoid"]] = ""
    #: Whether the model gives probabilities, as its loss takes them: outputs are their logits.
    from_probabilities = False
    #: Whether outputs are numbers in units of the label, so that a model may start at its mean.
    in_units = False
    #: The rule that chooses the positive of two classes if none is named: `rarity`, or `order`,
    #: which takes the second one; empty if there is none.
    positive_by: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        """Take a target; further arguments are `task.args`.

        Raises:
            ConfigError: the target is not a label of this task.
        """
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
        """Features besides the label that `details` reads from the `columns` of a `Part`."""
        return ()

    @property
    def learns(self) -> tuple[str, ...]:
        """Features of the training examples from which `constants` are computed."""
        return ()

    @property
    def unit(self) -> str:
        """The one of `columns` that identifies the sampling unit, such as a query.

        Examples of a unit are dependent. Empty if all examples are independent.
        """
        return ""

    @abstractmethod
    def loss(self) -> keras.losses.Loss:
        """Return the loss of labels and outputs."""

    def loss_labels(self, labels: Any) -> Any:
        """Convert labels for a user's loss: to the units of the outputs."""
        return labels

    @abstractmethod
    def chance_loss(self) -> float:
        """Return the loss of a blind guess; a loss far above it has diverged."""

    @abstractmethod
    def metrics(self) -> list[keras.Metric]:
        """Return metrics of labels and predictions, by the names of `directions`.

        The state of each metric has to be sums over the examples, like that of all Keras metrics:
        states of workers are added, and examples are resampled by adding others. The tally of a
        built-in task (`exact/tallies.py`) computes the value that the evaluation and the gate use.
        """

    @property
    def parts(self) -> Mapping[str, Task]:
        """The task of each output by name; a single output is the task itself, without a name."""
        return {"": self}

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """The weight of each of `parts` in the total loss; 1 for those not named."""
        return {}

    def set_thresholds(self, thresholds: Mapping[str, Any]) -> Task:
        """Return this task with decision thresholds for those of `parts` that use one."""
        if "" not in thresholds:
            return self
        found = copy.copy(self)
        found.threshold = thresholds[""]  # type: ignore[attr-defined]
        return found

    def outputs(self, given: Any) -> Any:
        """Convert what a model returns to outputs; it may return probabilities."""
        if not self.from_probabilities:
            return given
        least = keras.config.epsilon()
        p = tf.clip_by_value(given, least, 1 - least)
        return tf.math.log(p) - tf.math.log1p(-p) if self.link == "sigmoid" else tf.math.log(p)

    def given(self, outputs: Any) -> Any:
        """Convert outputs to what the model returns and its loss takes."""
        return self.predictions(outputs) if self.from_probabilities else outputs

    def predictions(self, outputs: Any) -> Any:
        """Convert a model's outputs to the predictions that metrics take."""
        return outputs

    def predicted(self, outputs: Any) -> Array | None:
        """Return the predicted class; None for a task without classes.

        It is a number [n], or one per position [n, positions]; for several classes at once bools
        [n, classes].
        """
        del outputs
        return None

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return the input of the AUC metrics: which labels are true, and scores [n, columns].

        The labels are bools [n, columns], or numbers [n] of the true column.
        """
        raise NotImplementedError(f"{self.name} has no AUC metrics")

    @abstractmethod
    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the answers of an exported model: columns by name."""

    @abstractmethod
    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Convert `answers` back to outputs, for a champion in its exported form."""

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

        Its value replaces that of `metrics` if that method is a built-in task's.
        """
        return Tally()

    def constants(self, examples: Examples) -> list[Constant]:
        """Return candidates for the best constant, by one metric or another: see `Constant`.

        They are computed from the labels of these examples, so that no other constant is better.
        """
        del examples
        return []

    def make_test(self, metric: str, part: Part) -> Tested | None:
        """Return a function that recomputes a metric of few examples many times.

        None for a metric that is compared with a constant by example.
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

        Called before a cluster starts, when `target.counts` and `target.moments` are known.
        """

    def check_labels(self, labels: Any) -> None:  # noqa: B027
        """Raise `SplitError` for labels that cannot be measured."""

    def check_output(self, output: Any, last: Any) -> None:
        """Refuse a model's symbolic output, or its last layer, if it does not fit the task.

        Raises:
            ConfigError: the output does not fit; the message says what it has to be.
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
        """Refuse a last layer of logits with a loss of probabilities, and the reverse."""
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
    """Return the operation that gives each output, in the structure of the outputs.

    For a model that is not a graph of layers, return its last layer.
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
