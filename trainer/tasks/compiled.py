"""What a compiled model says of its training: loss, metrics, and optimizer.

`model.compile(...)` is taken as far as it is not the run's to say: how many steps a call runs, and
whether XLA compiles them. What Keras makes of loss and metrics waits for the first labels and
outputs, and has variables; here it has none. What a metric has measured is a `State`: numbers in a
vector of sums over examples.
"""

from __future__ import annotations

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
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics, MetricsList

from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import named
from flotilla.trainer.tasks.base import Array, Task

Sums = npt.NDArray[np.float64]

_UNKNOWN = re.compile(r"Could not interpret (loss|metric) identifier: (\w+)$")


class Term(NamedTuple):
    """One loss of a sum: of the output at `path`, with a weight where it has one.

    `part` is the task of the output, where the loss is not its own.
    """

    path: tuple[Any, ...]
    loss: keras.losses.Loss
    weight: Any = None
    part: Task | None = None


class Measured(NamedTuple):
    """One metric of the output at `path`, by the name that it is reported by.

    `plain` says that it takes what the model gives, and not the predictions of the task; `weighted`
    that examples weigh in it, `own` that it is one of the task.
    """

    path: tuple[Any, ...]
    metric: keras.Metric
    prefix: str = ""
    plain: bool = False
    weighted: bool = True
    own: bool = False

    @property
    def name(self) -> str:
        """The name that it is reported by."""
        return f"{self.prefix}{self.metric.name}"


@dataclass(frozen=True, kw_only=True)
class State:
    """Numbers `begin` to `end` of a vector of sums, which make a metric, or the loss.

    `measured` is None for the loss, whose state is the examples and the sum of their losses.
    """

    name: str
    begin: int
    end: int
    shapes: tuple[tuple[int, ...], ...]
    measured: Measured | None

    @property
    def is_mean(self) -> bool:
        """Whether the state is a sum of weighted values and the sum of the weights."""
        metric = self.measured.metric if self.measured else None
        return isinstance(metric, keras.metrics.Mean) and _is_plain_mean(metric)

    def followed_by(self, measured: Measured) -> State:
        """Return the state of a metric, whose numbers come after these."""
        shapes = tuple(tuple(each.shape) for each in measured.metric.variables)
        end = self.end + sum(map(math.prod, shapes))
        name = measured.name
        return State(name=name, begin=self.end, end=end, shapes=shapes, measured=measured)

    def values(self, sums: Sums) -> dict[str, float | None]:
        """Return what a vector of sums says, None where it defines nothing; several of some."""
        state = sums[self.begin : self.end]
        if self.measured is None:
            return {self.name: float(state[1] / state[0])}
        return _by_name(self.measured, _result(self.measured.metric, self._variables(state)))

    def function(self, name: str) -> Callable[[Sums], float]:
        """Return a function that makes the metric of a state, fast enough for thousands."""
        measured = self.measured
        if measured is None:
            return lambda state: float(state[1] / state[0])

        @tf.function
        def result(state: list[tf.Tensor]) -> Any:
            return _made_of(measured.metric, state)

        def value(state: Sums) -> float:
            variables = [tf.constant(each, tf.float32) for each in self._variables(state)]
            found = _by_name(measured, result(variables)).get(name)
            return math.nan if found is None else found

        return value

    def _variables(self, state: Sums) -> list[Array]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        pieces = zip(np.split(state, ends), self.shapes, strict=True)
        return [np.reshape(piece, shape) for piece, shape in pieces]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The arguments of `model.compile`, as they were given.

    `jit_compile` says that XLA was asked for by name, and not chosen by Keras.
    """

    optimizer: keras.optimizers.Optimizer | None
    loss: Any
    loss_weights: Any
    metrics: Any
    weighted_metrics: Any
    output_names: list[str] | None
    jit_compile: bool

    def terms(self, labels: Any, outputs: Any) -> list[Term]:
        """Return the losses for labels and outputs of these shapes.

        Raises:
            ConfigError: they do not fit, or there is no loss of this name.
        """
        container = CompileLoss(self.loss, self.loss_weights, output_names=self.output_names)
        # Of several outputs it makes a metric for each, which nothing reads.
        with named.skip_initial_values(), _refused("loss"):
            container.build(labels, outputs)
        return [Term(each.path, each.loss, each.loss_weights) for each in container._flat_losses]

    def measured(self, labels: Any, outputs: Any) -> Iterator[Measured]:
        """Yield the metrics for labels and outputs of these shapes; Keras's rules name them.

        Raises:
            ConfigError: they do not fit, or there is no metric of this name.
        """
        if not (self.metrics or self.weighted_metrics):
            return
        container = CompileMetrics(
            self.metrics, self.weighted_metrics, output_names=self.output_names
        )
        with _refused("metrics"):
            container.build(labels, outputs)
        names = container._resolved_output_names or [""]
        both = (False, container._flat_metrics), (True, container._flat_weighted_metrics)
        for weighted, lists in both:
            for name, each in zip(names, lists, strict=True):
                path, prefix = ((name,), f"{name}_") if name else ((), "")
                for metric in each.metrics if isinstance(each, MetricsList) else ():
                    yield Measured(path, metric, prefix, plain=True, weighted=weighted)


@contextmanager
def _refused(argument: str) -> Iterator[None]:
    """Make a `ConfigError` of what Keras raises over an argument of `compile`."""
    try:
        yield
    except Exception as error:
        line = user_code.short_message(error)
        unknown = _UNKNOWN.search(line)
        hint = named.advise_nearest(unknown[1], unknown[2]) if unknown else ""
        raise ConfigError(f"its compile({argument}=...) does not fit: {line}{hint}") from error


def read_compiled(model: keras.Model) -> Compiled | None:
    """Return what a model was compiled with, or None.

    Raises:
        ConfigError: it was compiled for a training loop that is not ours.
    """
    if not model.compiled:
        return None
    if model.steps_per_execution != 1:
        raise ConfigError(
            f"it is compiled with steps_per_execution={model.steps_per_execution}, and the "
            "strategy decides how many steps run at once; leave it out"
        )
    if model.run_eagerly:
        raise ConfigError(
            "it is compiled with run_eagerly=True, and steps run as graphs on the tasks of a "
            "cluster; leave it out"
        )
    loss, metrics = model._compile_loss, model._compile_metrics
    return Compiled(
        optimizer=model.optimizer,
        loss=getattr(loss, "_user_loss", None),
        loss_weights=getattr(loss, "_user_loss_weights", None),
        metrics=getattr(metrics, "_user_metrics", None),
        weighted_metrics=getattr(metrics, "_user_weighted_metrics", None),
        output_names=getattr(model, "output_names", None),
        jit_compile=bool(model.jit_compile) and not model._resolve_auto_jit_compile(),
    )


def takes_logits(loss: keras.losses.Loss) -> bool | None:
    """Say whether a loss takes logits; None where it does not say."""
    given = getattr(loss, "from_logits", None)
    if given is None:
        given = getattr(loss, "_fn_kwargs", {}).get("from_logits")
    if given is None and (function := getattr(loss, "fn", None)):
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
        given = defaults.get("from_logits")
    return given if isinstance(given, bool) else None


def _is_plain_mean(metric: keras.Metric) -> bool:
    return type(metric).result is keras.metrics.Mean.result


def _result(metric: keras.Metric, state: Sequence[Array]) -> Any:
    """Return the result of a state; a plain mean in double precision, as thresholds are."""
    if _is_plain_mean(metric):
        total, count = state
        return float(total / count) if count else 0.0
    return _made_of(metric, [tf.constant(each, tf.float32) for each in state])


def _made_of(metric: keras.Metric, values: Sequence[tf.Tensor]) -> Any:
    with keras.StatelessScope(zip(metric.variables, values, strict=True)):
        # A metric that returns a variable has to be read here, where it has this value.
        return keras.tree.map_structure(tf.convert_to_tensor, metric.result())


def _by_name(measured: Measured, result: Any) -> dict[str, float | None]:
    """Return what a metric measured by name, None for no number; a mapping gives several."""
    values = result if isinstance(result, Mapping) else {measured.metric.name: result}
    found = {f"{measured.prefix}{name}": float(value) for name, value in values.items()}
    return {name: None if np.isnan(value) else value for name, value in found.items()}
