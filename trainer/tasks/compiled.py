"""The arguments of a model's `compile`, and the forms in which training uses losses and metrics.

Training uses the loss and the metrics in `model.compile(...)` unless the configuration replaces
them. It uses the optimizer only if `training.optimizer.name` is `model`. The strategy sets how many
steps run in one call, and `training.jit_compile` whether XLA compiles them. Keras keeps the states
of metrics in variables. Here, one vector of sums over examples contains all states. A `State`
describes the range of one metric in this vector.

A `TaskLoss` replaces Keras's loss container. Keras divides a loss by the number of replicas,
because it sums the gradients of all replicas. Here, gradients are averaged, so the loss is the mean
over the batch. Class weights apply only in training, as in Keras's `fit`. If an example has several
labels, each label has a weight.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras.src.losses import loss as keras_loss
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList

from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import named
from flotilla.trainer.tasks.base import Array, Task

Sums = npt.NDArray[np.float64]

_UNKNOWN = re.compile(r"Could not interpret (loss|metric) identifier: (\w+)$")


class Term(NamedTuple):
    """One term of the loss, for the output at `path`, with an optional weight.

    `part` is the task of this output, if known. It converts labels to the units of the output.
    """

    path: tuple[Any, ...]
    loss: keras.losses.Loss
    weight: Any = None
    part: Task | None = None


class Measured(NamedTuple):
    """A metric of the output at `path`.

    If `plain` is set, the metric receives what the model returns instead of the task's predictions.
    If `weighted` is set, it uses example weights. If `own` is set, the task defines the metric.
    """

    path: tuple[Any, ...]
    metric: keras.Metric
    prefix: str = ""
    plain: bool = False
    weighted: bool = True
    own: bool = False

    @property
    def name(self) -> str:
        """The name in reports."""
        return f"{self.prefix}{self.metric.name}"


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a metric or of the loss: the range `begin:end` of a vector of sums.

    For the loss, `measured` is None, and the state consists of the number of examples and the sum
    of their losses.
    """

    name: str
    begin: int
    end: int
    shapes: tuple[tuple[int, ...], ...]
    measured: Measured | None

    @property
    def is_mean(self) -> bool:
        """Whether the state consists of a weighted sum and the sum of the weights."""
        metric = self.measured.metric if self.measured else None
        return isinstance(metric, keras.metrics.Mean) and _is_plain_mean(metric)

    def next_state(self, measured: Measured) -> State:
        """Return the state of the next metric, whose range begins where this one ends."""
        shapes = tuple(tuple(each.shape) for each in measured.metric.variables)
        end = self.end + sum(map(math.prod, shapes))
        name = measured.name
        return State(name=name, begin=self.end, end=end, shapes=shapes, measured=measured)

    def values(self, sums: Sums) -> dict[str, float | None]:
        """Return the values of the metric, keyed by name. An undefined value is None."""
        state = sums[self.begin : self.end]
        if self.measured is None:
            return {self.name: float(state[1] / state[0])}
        return _name_results(self.measured, _result(self.measured.metric, self._variables(state)))

    def function(self, name: str) -> Callable[[Sums], float]:
        """Return a function that computes the metric `name` from a state, faster than `values`."""
        measured = self.measured
        if measured is None:
            return lambda state: float(state[1] / state[0])

        @tf.function
        def result(state: list[tf.Tensor]) -> Any:
            return _compute(measured.metric, state)

        def value(state: Sums) -> float:
            variables = [tf.constant(each, tf.float32) for each in self._variables(state)]
            found = _name_results(measured, result(variables)).get(name)
            return math.nan if found is None else found

        return value

    def _variables(self, state: Sums) -> list[Array]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        pieces = zip(np.split(state, ends), self.shapes, strict=True)
        return [np.reshape(piece, shape) for piece, shape in pieces]


class Compiled:
    """The arguments of `model.compile`.

    `jit_compile` is true only if the user set it and Keras would not choose XLA by default.
    """

    def __init__(self, model: keras.Model) -> None:
        """Read the arguments of a compiled model."""
        loss, metrics = model._compile_loss, model._compile_metrics
        self.optimizer: keras.optimizers.Optimizer | None = model.optimizer
        self.loss = getattr(loss, "_user_loss", None)
        self.loss_weights = getattr(loss, "_user_loss_weights", None)
        self.metrics = getattr(metrics, "_user_metrics", None)
        self.weighted_metrics = getattr(metrics, "_user_weighted_metrics", None)
        self.output_names = getattr(model, "output_names", None)
        self.jit_compile = bool(model.jit_compile) and not model._resolve_auto_jit_compile()

    def terms(self, labels: Any, outputs: Any) -> list[Term]:
        """Return the losses for labels and outputs of these shapes.

        Raises:
            ConfigError: a loss does not fit the shapes, or its name is unknown.
        """
        container = CompileLoss(self.loss, self.loss_weights, output_names=self.output_names)
        # For several outputs, Keras creates an unused metric per loss. Do not initialize these.
        with named.skip_initial_values(), _convert_errors("loss"):
            container.build(labels, outputs)
        return [Term(each.path, each.loss, each.loss_weights) for each in container._flat_losses]

    def measured(self, labels: Any, outputs: Any) -> Iterator[Measured]:
        """Yield the metrics for labels and outputs of these shapes, under their Keras names.

        Raises:
            ConfigError: a metric does not fit the shapes, or its name is unknown.
        """
        if not (self.metrics or self.weighted_metrics):
            return
        container = CompileMetrics(
            self.metrics, self.weighted_metrics, output_names=self.output_names
        )
        with _convert_errors("metrics"):
            container.build(labels, outputs)
        names = container._resolved_output_names or [""]
        both = (False, container._flat_metrics), (True, container._flat_weighted_metrics)
        for weighted, lists in both:
            for name, each in zip(names, lists, strict=True):
                path, prefix = ((name,), f"{name}_") if name else ((), "")
                for metric in each.metrics if isinstance(each, MetricsList) else ():
                    yield Measured(path, metric, prefix, plain=True, weighted=weighted)


@contextmanager
def _convert_errors(argument: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        line = user_code.short_message(error)
        unknown = _UNKNOWN.search(line)
        hint = named.advise_nearest(unknown[1], unknown[2]) if unknown else ""
        raise ConfigError(f"the model's compile({argument}=...) fails: {line}{hint}") from error


def read_compiled(model: keras.Model) -> Compiled | None:
    """Return the arguments of a model's `compile`, or None if it is not compiled.

    Raises:
        ConfigError: an argument is incompatible with training on a cluster.
    """
    if not model.compiled:
        return None
    if model.steps_per_execution != 1:
        raise ConfigError(
            f"the model is compiled with steps_per_execution={model.steps_per_execution}, but the "
            "strategy decides how many steps run at once; remove steps_per_execution"
        )
    if model.run_eagerly:
        raise ConfigError(
            "the model is compiled with run_eagerly=True, but the tasks of a cluster run steps as "
            "graphs; remove run_eagerly"
        )
    return Compiled(model)


def takes_logits(loss: keras.losses.Loss) -> bool | None:
    """Return whether a loss expects logits, or None if unknown, as for a wrapped function."""
    given = getattr(loss, "from_logits", None)
    if given is None:
        given = getattr(loss, "_fn_kwargs", {}).get("from_logits")
    if given is None and (function := getattr(loss, "fn", None)):
        parameter = inspect.signature(function, follow_wrapped=False).parameters.get("from_logits")
        given = parameter and parameter.default
    return given if isinstance(given, bool) else None


def _is_plain_mean(metric: keras.Metric) -> bool:
    return type(metric).result is keras.metrics.Mean.result


def _result(metric: keras.Metric, state: Sequence[Array]) -> Any:
    """Compute a metric from its state, in double precision if the metric is a plain mean."""
    if _is_plain_mean(metric):
        total, count = state
        return float(total / count) if count else 0.0
    return _compute(metric, [tf.constant(each, tf.float32) for each in state])


def _compute(metric: keras.Metric, values: Sequence[tf.Tensor]) -> Any:
    with keras.StatelessScope(zip(metric.variables, values, strict=True)):
        # Variables have these values only in this scope, so convert results to tensors here.
        return keras.tree.map_structure(tf.convert_to_tensor, metric.result())


def _name_results(measured: Measured, result: Any) -> dict[str, float | None]:
    """Return the values of a metric, keyed by name, with None instead of NaN."""
    values = result if isinstance(result, Mapping) else {measured.metric.name: result}
    found = {f"{measured.prefix}{name}": float(value) for name, value in values.items()}
    return {name: None if np.isnan(value) else value for name, value in found.items()}


class TaskLoss:
    """The loss of a task, which replaces Keras's loss container. It has no variables."""

    metrics: tuple[()] = ()
    variables: tuple[()] = ()

    def __init__(self, terms: Sequence[Term]) -> None:
        """Store the terms, whose sum is the loss."""
        self.terms = terms

    def __call__(self, labels: Any, outputs: Any, weights: Any = None) -> tf.Tensor:
        """Return the mean loss of a batch, from the values that the model returns."""
        total = tf.constant(0.0)
        for path, loss, weight, part in self.terms:
            true = find_at_path(labels, path)
            if part is not None:
                true = part.loss_labels(true)
            each = _split_labels(true, find_at_path(outputs, path), find_at_path(weights, path))
            value = tf.cast(loss(*each), tf.float32)
            total += value if weight is None else value * weight
        return total


def find_at_path(tree: Any, path: Sequence[Any]) -> Any:
    """Return the value at a path of a nested mapping. A plain value applies to all paths."""
    for key in path:
        tree = tree[key] if isinstance(tree, Mapping) else tree
    return tree


def _split_labels(labels: Any, outputs: Any, weights: Any) -> tuple[Any, Any, Any]:
    """Add an axis if each label has its own weight, so that each label also has its own loss."""
    rank = len(labels.shape)
    if weights is not None and rank > 1 and rank == len(weights.shape) == len(outputs.shape):
        return labels[..., tf.newaxis], outputs[..., tf.newaxis], weights
    return labels, outputs, weights


def cast_layer_loss(loss: Any) -> tf.Tensor:
    """Return a layer's loss as a float32 scalar, because Keras cannot add different types."""
    return keras_loss.scale_loss_for_distribution(tf.reduce_sum(tf.cast(loss, tf.float32)))


@contextmanager
def whole_losses() -> Iterator[None]:
    """Prevent Keras from dividing losses by the number of replicas in this block.

    Keras divides all losses except those of a user's `compute_loss`.
    """
    divide = keras_loss.scale_loss_for_distribution
    keras_loss.scale_loss_for_distribution = lambda value: value
    try:
        yield
    finally:
        keras_loss.scale_loss_for_distribution = divide


def weights_by_class(weights: Array, task: Task, labels: Any, examples: Any) -> tf.Tensor:
    """Return the training weights of a batch, in the shape of its labels.

    `examples` are the weights of the examples, or None.
    """
    each = tf.constant(weights)
    if len(task.target.shape) == 1 and task.link == "sigmoid":
        found = tf.where(tf.cast(labels, tf.bool), each, tf.ones_like(each))
    else:
        # Labels below zero are padding. Any weight will do, because the loss ignores them.
        found = tf.gather(each, tf.maximum(tf.cast(labels, tf.int32), 0))
    if examples is None:
        return found
    more = [1] * (found.shape.rank - examples.shape.rank)
    sizes = [*tf.unstack(tf.shape(examples)), *more]
    return found * tf.reshape(tf.cast(examples, tf.float32), sizes)
