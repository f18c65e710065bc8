"""The interface of a learning task.

A task is the one place that knows what a label is: which loss is minimised, which metrics are
measured, what the outputs of a model mean, and what is written of them. A subclass is a task of its
own; everything else in this package works with any of them.

The words for what a model gives, in the order in which one becomes the other:

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
    """What a dataset says of a feature that is to be predicted.

    Attributes:
        name: of the feature.
        shape: of one example's value; empty for a single one, -1 for a size that varies.
        dtype: NumPy's name of its type.
        num_classes: how many classes its values name; 0 where they are quantities.
        labels: names of the classes, where they have names.
        counts: examples of each class by split; empty where it has no classes, or is not prepared.
        moments: mean, std, min and max over the training split; empty before it is prepared.
    """

    name: str
    shape: Shape
    dtype: str
    num_classes: int = 0
    labels: tuple[str, ...] = ()
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    moments: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Describe it as a message does."""
        classes = f" of {self.num_classes} classes" if self.num_classes else ""
        what = f"one {self.dtype}" if not self.shape else f"{self.dtype} of shape {self.shape}"
        return f"{self.name!r} ({what}{classes})"


class Part(NamedTuple):
    """Some examples, in the order of the dataset: arrays whose first axis is the examples.

    Of several targets `labels` and `outputs` are mappings by name. `weights` is None where all
    examples weigh the same. `columns` are the features that an evaluation is sliced by, and those
    that a task asks for.
    """

    labels: Any
    outputs: Any
    weights: Floats | None
    columns: Mapping[str, Array]


class Examples(Protocol):
    """The examples of a split with what a model gave for them, of any number."""

    @property
    def count(self) -> int:
        """How many there are."""

    def parts(self) -> Iterator[Part]:
        """Read all of them in parts that fit into memory; may be called again."""


#: Returns a metric, and what tests that it is not by chance, of outputs with labels in an order.
Tested = Callable[[npt.NDArray[np.intp]], tuple[float, float]]


class Constant(NamedTuple):
    """What a model can answer without the inputs: `answer` says it, `outputs` are of one example.

    With `make` they are made of a part: of what is known of its columns from the training.
    """

    answer: str
    outputs: Any
    make: Callable[[Part], Any] | None = None

    def answered(self, part: Part) -> Part:
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
        """How many there are."""
        return len(tf.nest.flatten(self.part.labels)[0])

    def parts(self) -> Iterator[Part]:
        """Read all of them."""
        yield self.part


@dataclass(frozen=True)
class Remade:
    """Examples whose parts are made anew while they are read: see `Examples`."""

    examples: Examples
    make: Callable[[Part], Part]

    @property
    def count(self) -> int:
        """How many there are."""
        return self.examples.count

    def parts(self) -> Iterator[Part]:
        """Read all of them."""
        return map(self.make, self.examples.parts())


def example_weights(part: Part) -> Floats:
    """Return what each example weighs [n]: 1 where they all weigh the same."""
    count = len(tf.nest.flatten(part.labels)[0])
    return np.ones(count) if part.weights is None else np.float64(part.weights).ravel()


def weighted_mean(examples: Examples, values: Callable[[Part], Array]) -> Floats:
    """Return the weighted mean over the examples of some values [n, ...] that each has."""
    total: Any = 0.0
    weight = 0.0
    for part in examples.parts():
        weights = example_weights(part)
        total = total + np.tensordot(weights, np.float64(values(part)), 1)
        weight += weights.sum()
    return np.asarray(total / weight)


class Tally:
    """Sums over parts of the examples, and the metrics that a task makes of them."""

    def add(self, part: Part) -> None:
        """Add some examples."""

    def condense(self) -> None:
        """Hold less of the examples so far, of which there are many."""

    def result(self) -> dict[str, Any]:
        """Return `metrics` and `intervals` by name, and of all examples what `details` may have."""
        return {}


def sample_examples(examples: Examples, most: int = 100_000) -> Part:
    """Return all examples, or of more than `most` every second, third, ..., for a picture of them.

    Metrics are not made of these, but of all examples.
    """
    step = -(-examples.count // most) or 1
    parts, begin = [], 0
    for part in examples.parts():
        rows = slice(begin, None, step)
        size = len(tf.nest.flatten(part.labels)[0])
        begin = (begin - size) % step
        parts.append(tf.nest.map_structure(lambda each, at=rows: _at(each, at), part))
    whole: Part = tf.nest.map_structure(
        lambda *each: None if each[0] is None else np.concatenate(each), *parts
    )
    return whole


def _at(values: Any, rows: slice) -> Any:
    # A view would keep the whole part.
    return None if values is None else values[rows].copy()


class SplitError(UserError):
    """The examples of a split cannot be measured; says what the split has."""


def refuse_labels(labels: Any, wrong: Any, why: str) -> None:
    """Raise `SplitError` with the first label that is wrong, if one is."""
    found = np.asarray(labels)[wrong]
    if len(found):
        raise SplitError(f"the label {found[0]}, {why}; correct its builder")


class Task(ABC):
    """One learning task for one target."""

    #: As `task.name` says it; that of a task of the user's stands in reports and models.
    name: ClassVar[str]
    #: Whether a higher or a lower value of a metric is better, None where neither is; of all that
    #: the task measures.
    directions: ClassVar[Mapping[str, Direction | None]]
    #: What makes probabilities of the outputs; empty where no prediction is one.
    link: ClassVar[Literal["", "softmax", "sigmoid"]] = ""
    #: Whether the model gives probabilities, as its loss takes them: outputs are their logits.
    from_probabilities = False
    #: Whether outputs are numbers in units of the label, which a model may begin at its mean.
    in_units = False
    #: What makes one of two classes the positive one where none is named: `rarity` or `order`,
    #: which is the second one; empty where there is none.
    positive_by: ClassVar[str] = ""

    def __init__(self, target: Target) -> None:
        """Take a target; further arguments are `task.args`.

        Raises:
            ConfigError: it is no label of this task.
        """
        self.target = target

    @property
    @abstractmethod
    def output_shape(self) -> Shape:
        """The shape that a model's output has to have for one example; -1 for any size."""

    @property
    @abstractmethod
    def main_metric(self) -> str:
        """The metric that models are selected and compared by, where the configuration names none.

        It may depend on the training examples: `target.counts`.
        """

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classes, one for each column of the probabilities; empty without classes."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Features besides the label that `details` reads: `columns` of a `Part` has them."""
        return ()

    @property
    def learns(self) -> tuple[str, ...]:
        """Features of the training examples that `constants` are made of."""
        return ()

    @property
    def unit(self) -> str:
        """The one of `columns` whose values name what is drawn as one, such as a query.

        Its examples depend on each other. Empty where each example is drawn by itself.
        """
        return ""

    @abstractmethod
    def loss(self) -> keras.losses.Loss:
        """Return the loss of labels and outputs, which training minimises."""

    def loss_labels(self, labels: Any) -> Any:
        """Return labels as a loss of the user's takes them: in the units of the outputs."""
        return labels

    @abstractmethod
    def chance_loss(self) -> float:
        """Return what a blind guess costs; a loss far above it has diverged."""

    @abstractmethod
    def metrics(self) -> list[keras.Metric]:
        """Return metrics of labels and predictions, by the names of `directions`.

        The state of each has to be sums over the examples, as that of all of Keras's is: states of
        workers are added, and examples are drawn anew by adding up other ones.
        """

    @property
    def parts(self) -> Mapping[str, Task]:
        """The task of each output by name; of a single output the task itself, without a name."""
        return {"": self}

    @property
    def loss_weights(self) -> Mapping[str, float]:
        """What the loss of each of `parts` counts in the sum; 1 for those that are not named."""
        return {}

    def at(self, thresholds: Mapping[str, Any]) -> Task:
        """Return this task with the thresholds of those of `parts` that decide by one."""
        if "" not in thresholds:
            return self
        found = copy.copy(self)
        found.threshold = thresholds[""]  # type: ignore[attr-defined]
        return found

    def outputs(self, given: Any) -> Any:
        """Return outputs from what a model gives, which may be probabilities."""
        if not self.from_probabilities:
            return given
        least = keras.config.epsilon()
        p = tf.clip_by_value(given, least, 1 - least)
        return tf.math.log(p) - tf.math.log1p(-p) if self.link == "sigmoid" else tf.math.log(p)

    def given(self, outputs: Any) -> Any:
        """Return what the model gave for these outputs, which its loss takes."""
        return self.predictions(outputs) if self.from_probabilities else outputs

    def predictions(self, outputs: Any) -> Any:
        """Return what metrics take, from a model's outputs."""
        return outputs

    def predicted(self, outputs: Any) -> Array | None:
        """Return the class that is predicted; None of a task without classes.

        A number [n], or one of each place [n, places]; of several classes at once [n, classes] of
        truths.
        """
        del outputs
        return None

    def scored(self, labels: Any, outputs: Any) -> tuple[Array, Floats]:
        """Return what areas are made of: scores [n, columns], and which are true of each column.

        Those are truths [n, columns], or numbers [n] of the column that is true.
        """
        raise NotImplementedError(f"{self.name} has no areas")

    @abstractmethod
    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return what an exported model answers: columns by name."""

    @abstractmethod
    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the outputs from `answers`: what the champion gave, in its exported form."""

    @abstractmethod
    def example_losses(self, labels: Array, outputs: Array) -> Floats:
        """Return the loss [n] of each example; the highest ones are shown."""

    @abstractmethod
    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Return the cells by which one example is shown: `label`, `predicted`, and more."""

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return what an evaluation says besides the metrics, as plain data.

        `metrics` and `intervals` are added to those of `metrics()`. The report draws
        `confusion_matrix` with `labels`, `per_class`, `calibration` and `curves` (see
        `flotilla.trainer.tasks.classification`), and of any task

            tables   [{"title", "columns": [text], "rows": [[value]]}]
            charts   [{"title", "x", "y", "series": {label: [[x, y]]}}]
        """
        del examples
        return {}

    def tally(self) -> Tally:
        """Return what measures all examples of an evaluation, or those of a slice.

        What `metrics` measures too is taken from here where that method is a task's built in.
        """
        return Tally()

    def constants(self, examples: Examples) -> list[Constant]:
        """Return what can be best without the inputs, by one metric or another: see `Constant`.

        It is made of the labels of these very examples, so that nothing learnt elsewhere is better.
        """
        del examples
        return []

    def tested_by(self, metric: str, part: Part) -> Tested | None:
        """Return what measures a metric of few examples again and again.

        None of a metric that is compared with a constant by example.
        """
        del metric, part
        return None

    def of_each(self, metric: str, part: Part) -> Floats | None:
        """Return the values [n] of a metric that is their mean; None where its state is asked.

        That of each example alone takes a hundred times as long.
        """
        del metric, part
        return None

    def of_groups(self, metric: str, examples: Examples) -> Floats | None:
        """Return the values by query of a metric that is their mean; None of any other."""
        del metric, examples
        return None

    def learn(self, training: Iterable[Mapping[str, Array]]) -> None:  # noqa: B027
        """Take what constants need of the `learns` of all training examples, batch by batch."""

    def check(self) -> None:  # noqa: B027
        """Refuse what the prepared dataset holds; raises `ConfigError`.

        Called before a cluster starts, when `target.counts` and `target.moments` are known.
        """

    def check_labels(self, labels: Any) -> None:  # noqa: B027
        """Refuse labels of examples that cannot be measured; raises `SplitError`."""

    def check_output(self, output: Any, last: Any) -> None:
        """Refuse a model's symbolic output that does not fit, or the layer that gives it.

        Raises:
            ConfigError: with what the output has to be.
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
                f"its output has to be floats of shape ({sizes}) for {self.name} of {self.target}, "
                f"not {output.dtype} of shape {shape}"
            )
        self._check_activation(find_activation(last))

    def _check_activation(self, activation: str) -> None:
        """Refuse a last layer that gives logits to a loss of probabilities, or the other way."""
        if not self.link:
            return
        if self.from_probabilities and activation in {"linear", "dense"}:
            raise ConfigError(
                f"its loss takes probabilities, and its last layer gives logits: add a {self.link} "
                "to it, or compile it with a loss of from_logits=True"
            )
        if activation == "softmax" and self.output_shape[-1:] == (1,):
            raise ConfigError(
                "its last layer is a softmax of one column, which is always 1; end it by Dense(1)"
            )
        if not self.from_probabilities and activation == self.link:
            raise ConfigError(
                f"it has to return logits; remove the {self.link} from its last layer, or compile "
                "it with a loss that takes probabilities"
            )


def last_layers(model: keras.Model) -> Any:
    """Return the operation that gives each output, in the structure of the outputs.

    Of a model that is no graph of layers, its last layer.
    """
    graph = getattr(model, "_functional", None) or model
    outputs = getattr(graph, "_outputs_struct", None)
    if outputs is None:
        return model.layers[-1] if model.layers else None
    return keras.tree.map_structure(lambda each: each._keras_history.operation, outputs)


def find_activation(layer: Any) -> str:
    """Return the name of the activation by which a layer ends; empty where it is not known."""
    while isinstance(layer, keras.Model):
        found = last_layers(layer)
        layer = None if keras.tree.is_nested(found) else found
    function = getattr(layer, "activation", None)
    if function is not None:
        return str(getattr(function, "__name__", ""))
    return type(layer).__name__.lower() if layer is not None else ""
