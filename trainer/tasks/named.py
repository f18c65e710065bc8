"""Losses and metrics by name: Keras's own (snake case or class), or `package.module:name`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state

from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, nearest
from flotilla.trainer.tasks.base import Direction

# Keras's list of variables without a value.
_WAITING = "uninitialized_variables"
# Keras chooses among its own by the shapes of labels and outputs.
_BY_SHAPE = ("accuracy", "acc")
_SHORT = ("bce", "mse", "mae", "mape", "msle")
_BASES = {"Loss", "LossFunctionWrapper", "Metric", "Mean", "Sum", "MeanMetricWrapper"}
_LOWER = re.compile(r"error|loss|crossentropy|hinge|divergence|poisson|log_cosh|^(ms|ma|bc|kl)")
_HIGHER = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|f1|f_beta|r2_score|io_u|cosine|correlation"
)
# The class of all of Keras's losses of a function, which it does not export.
_LossFunctionWrapper = keras.losses.MeanSquaredError.__base__


def _snake_case(name: str) -> str:
    """Return the name of a class in lower case, as Keras does."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def _losses() -> Iterator[tuple[str, Any]]:
    for name, each in vars(keras.losses).items():
        is_function = inspect.isfunction(each) and name not in {"get", "serialize", "deserialize"}
        if is_function or (inspect.isclass(each) and name not in _BASES):
            yield name, each
    for name in (*_SHORT, "kld"):
        yield from ((each, keras.losses.get(each)) for each in (name, name.upper()))


def _metrics() -> Iterator[tuple[str, Any]]:
    for name, each in vars(keras.metrics).items():
        if inspect.isclass(each) and name not in _BASES:
            yield from ((name, each), (_snake_case(name), each))
    # Asking Keras for one of these names makes it, which starts TensorFlow's threads: tasks are
    # forked from a process that has imported this.
    long = (
        keras.metrics.BinaryCrossentropy,
        keras.metrics.MeanSquaredError,
        keras.metrics.MeanAbsoluteError,
        keras.metrics.MeanAbsolutePercentageError,
        keras.metrics.MeanSquaredLogarithmicError,
    )
    for name, kind in zip(_SHORT, long, strict=True):
        yield from ((each, kind) for each in (name, name.upper()))


#: Keras's own by name: functions and classes of losses, classes of metrics.
LOSSES, METRICS = dict(_losses()), dict(_metrics())
_MODULES = {"loss": ("keras.losses", LOSSES), "metric": ("keras.metrics", METRICS)}


@contextmanager
def skip_initial_values() -> Iterator[None]:
    """Give the variables that are made within no values, now and later: nothing reads them.

    Keras would make up for it where the next scope without state ends, wherever that is: with the
    variables of a model that is placed on parameter servers, for one.
    """
    waiting = list(global_state.get_global_attribute(_WAITING, []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(_WAITING, waiting)


def loss(name: str, key: str, *, logits: bool) -> keras.losses.Loss:
    """Return the loss that the configuration names at `key`.

    A cross entropy of Keras's takes `logits` or probabilities; its name alone says neither.

    Raises:
        ConfigError: there is none of this name, or it cannot be made.
    """
    found = _found("loss", name, key)
    takes = inspect.signature(found).parameters if callable(found) else {}
    given = {"from_logits": logits} if ":" not in name and "from_logits" in takes else {}
    if inspect.isclass(found):
        found = _made(key, name, lambda: found(**given))
    elif callable(found) and not isinstance(found, keras.losses.Loss):
        found = _LossFunctionWrapper(found, name=name.rpartition(":")[2], **given)
    if not isinstance(found, keras.losses.Loss):
        raise ConfigError(f"{key}: {name} is a {type(found).__name__}, not a loss")
    return found


def metric(name: str, key: str, labels: Any, predictions: Any) -> keras.Metric:
    """Return the metric that the configuration names at `key`; that of a class by default.

    A function without arguments returns a metric; any other one is averaged over the examples.

    Raises:
        ConfigError: there is none of this name, or it cannot be made.
    """
    if name in _BY_SHAPE:
        return _accuracy(labels, predictions)(name=name)
    found = _found("metric", name, key)
    called = report_name(name)
    if inspect.isclass(found):
        found = _made(key, name, found)
        called = called if name in METRICS else found.name
    elif callable(found) and not isinstance(found, keras.Metric):
        function = found
        if inspect.signature(function).parameters:
            return keras.metrics.MeanMetricWrapper(function, name=called)
        found = _made(key, name, function)
        called = getattr(found, "name", called)
    if not isinstance(found, keras.Metric):
        raise ConfigError(f"{key}: {name} is a {type(found).__name__}, not a metric")
    found.name = called
    return found


def _accuracy(labels: Any, predictions: Any) -> Any:
    """Return the accuracy that Keras takes for labels and predictions of these shapes."""
    *more, classes = predictions.shape
    if classes == 1:
        return keras.metrics.BinaryAccuracy
    if len(labels.shape) <= len(more) or labels.shape[-1] == 1:
        return keras.metrics.SparseCategoricalAccuracy
    return keras.metrics.CategoricalAccuracy


def report_name(name: str) -> str:
    """Return by which name a metric of Keras's, or a function, is reported: in snake case."""
    return _snake_case(name) if name in METRICS else name.rpartition(":")[2]


def find_direction(metric: keras.Metric) -> Direction | None:
    """Say whether a higher or a lower value is better; None for what Keras does not know."""
    kind = class_name(metric)
    if kind not in METRICS and kind not in LOSSES:
        return None
    if _LOWER.search(kind):
        return "lower"
    return "higher" if _HIGHER.search(kind) else None


def class_name(metric: keras.Metric) -> str:
    """Return the name of a metric's class, or of the function that it averages, in snake case."""
    function = getattr(metric, "_fn", None)
    if function is not None and type(metric) is keras.metrics.MeanMetricWrapper:
        return str(getattr(function, "__name__", ""))
    return _snake_case(type(metric).__name__)


def is_by_class(loss: keras.losses.Loss) -> bool:
    """Say whether a loss takes an output for each class; of one output it is always 0."""
    return "categorical" in getattr(getattr(loss, "fn", None), "__name__", "")


def advise_sparse(losses: Iterable[keras.losses.Loss]) -> str:
    """Return a hint at the losses of class numbers in place of those of one-hot labels."""
    kinds = [getattr(getattr(loss, "fn", None), "__name__", "") for loss in losses]
    sparse = [f"sparse_{kind}" for kind in kinds if f"sparse_{kind}" in LOSSES]
    return f"; of labels that are numbers of classes, use {', '.join(sparse)}" if sparse else ""


def _found(kind: str, name: str, key: str) -> Any:
    known = _MODULES[kind][1]
    if ":" in name:
        return user_code.find_named(key, name, kind)
    if name in known:
        return known[name]
    hint = advise_nearest(kind, name) or f" (a name of {_MODULES[kind][0]}, or package.module:name)"
    raise ConfigError(f"{key}: no {kind} {name!r}{hint}")


def advise_nearest(kind: str, name: str) -> str:
    """Return a hint at the loss or the metric of Keras's that is meant; empty if none is near."""
    return nearest(name, _MODULES[kind][1])


def _made(key: str, name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    # A class of the user's may fail in any way.
    except Exception as error:
        raise ConfigError(
            f"{key}: {name} cannot be made without arguments: {user_code.format_error(error)}; "
            "write a function that returns it, and name it as package.module:function"
        ) from error
