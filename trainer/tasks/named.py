"""Looks up losses and metrics by Keras name (snake case or class) or `package.module:name`."""

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

# The Keras attribute with the list of variables that are not initialized yet.
_WAITING = "uninitialized_variables"
# For these names, Keras chooses the kind of accuracy by the shapes of labels and outputs.
_BY_SHAPE = ("accuracy", "acc")
_SHORT = ("bce", "mse", "mae", "mape", "msle")
_BASES = {"Loss", "LossFunctionWrapper", "Metric", "Mean", "Sum", "MeanMetricWrapper"}
_LOWER = re.compile(r"error|loss|crossentropy|hinge|divergence|poisson|log_cosh|^(ms|ma|bc|kl)")
_HIGHER = re.compile(
    r"acc|auc|precision|recall|sensitivity|specificity|f1|f_beta|r2_score|io_u|cosine|correlation"
)
# The base class of Keras losses that wrap a function. Keras does not export it.
_LossFunctionWrapper = keras.losses.MeanSquaredError.__base__


def _snake_case(name: str) -> str:
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


#: The functions and classes of Keras losses, and the classes of Keras metrics, by name.
LOSSES, METRICS = dict(_losses()), dict(_metrics())
# Do not look up these metrics with Keras. The lookup would create objects, which would start
# TensorFlow's threads in a process that later forks tasks.
METRICS |= {
    each: METRICS[LOSSES[name].__name__] for name in _SHORT for each in (name, name.upper())
}
_MODULES = {"loss": ("keras.losses", LOSSES), "metric": ("keras.metrics", METRICS)}


@contextmanager
def skip_initial_values() -> Iterator[None]:
    """Do not initialize variables that are created in this block, because they are never read.

    Otherwise, Keras would initialize them at the end of the next stateless scope, for example
    together with the variables of a model on parameter servers.
    """
    waiting = list(global_state.get_global_attribute(_WAITING, []))
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(_WAITING, waiting)


def loss(name: str, key: str, *, logits: bool) -> keras.losses.Loss:
    """Create the loss that is named in the configuration at `key`.

    `logits` indicates whether Keras losses receive logits rather than probabilities.

    Raises:
        ConfigError: the name is unknown, or the loss cannot be created.
    """
    found = _find("loss", name, key)
    takes = inspect.signature(found).parameters if callable(found) else {}
    given = {"from_logits": logits} if ":" not in name and "from_logits" in takes else {}
    if inspect.isclass(found):
        found = _instantiate(key, name, lambda: found(**given))
    elif callable(found) and not isinstance(found, keras.losses.Loss):
        found = _LossFunctionWrapper(found, name=name.rpartition(":")[2], **given)
    if not isinstance(found, keras.losses.Loss):
        raise ConfigError(f"{key}: {name} is a {type(found).__name__}, not a loss")
    return found


def metric(name: str, key: str, labels: Any, predictions: Any) -> keras.Metric:
    """Create the metric that is named in the configuration at `key`, with default arguments.

    In reports, a metric of Keras has its name in snake case, and a function its own name.
    If the name refers to a function without arguments, the function must return a metric. The
    values of a function with arguments are averaged over the examples.

    Raises:
        ConfigError: the name is unknown, or the metric cannot be created.
    """
    if name in _BY_SHAPE:
        return _accuracy(labels, predictions)(name=name)
    found = _find("metric", name, key)
    called = _snake_case(name) if name in METRICS else name.rpartition(":")[2]
    if inspect.isclass(found):
        found = _instantiate(key, name, found)
        called = called if name in METRICS else found.name
    elif callable(found) and not isinstance(found, keras.Metric):
        function = found
        if inspect.signature(function).parameters:
            return keras.metrics.MeanMetricWrapper(function, name=called)
        found = _instantiate(key, name, function)
        called = getattr(found, "name", called)
    if not isinstance(found, keras.Metric):
        raise ConfigError(f"{key}: {name} is a {type(found).__name__}, not a metric")
    found.name = called
    return found


def _accuracy(labels: Any, predictions: Any) -> Any:
    *more, classes = predictions.shape
    if classes == 1:
        return keras.metrics.BinaryAccuracy
    if len(labels.shape) <= len(more) or labels.shape[-1] == 1:
        return keras.metrics.SparseCategoricalAccuracy
    return keras.metrics.CategoricalAccuracy


def find_direction(metric: keras.Metric) -> Direction | None:
    """Return whether a higher or a lower value of a metric is better, or None if unknown."""
    kind = class_name(metric)
    if kind not in METRICS and kind not in LOSSES:
        return None
    if _LOWER.search(kind):
        return "lower"
    return "higher" if _HIGHER.search(kind) else None


def class_name(metric: keras.Metric) -> str:
    """Return the name of the function whose values a metric averages, or of the metric's class."""
    function = getattr(metric, "_fn", None)
    if function is not None and type(metric) is keras.metrics.MeanMetricWrapper:
        return str(getattr(function, "__name__", ""))
    return _snake_case(type(metric).__name__)


def is_by_class(loss: keras.losses.Loss) -> bool:
    """Return whether a loss, such as a categorical cross entropy, needs one output per class."""
    return "categorical" in getattr(getattr(loss, "fn", None), "__name__", "")


def advise_sparse(losses: Iterable[keras.losses.Loss]) -> str:
    """Return a hint to use the sparse forms of these losses, or "" if they have none."""
    kinds = [getattr(getattr(loss, "fn", None), "__name__", "") for loss in losses]
    sparse = [f"sparse_{kind}" for kind in kinds if f"sparse_{kind}" in LOSSES]
    return f"; for labels that are class numbers, use {', '.join(sparse)}" if sparse else ""


def _find(kind: str, name: str, key: str) -> Any:
    known = _MODULES[kind][1]
    if ":" in name:
        return user_code.find_named(key, name, kind)
    if name in known:
        return known[name]
    hint = advise_nearest(kind, name) or f" (see {_MODULES[kind][0]}, or use package.module:name)"
    raise ConfigError(f"{key}: there is no {kind} {name!r}{hint}")


def advise_nearest(kind: str, name: str) -> str:
    """Return a hint with the closest Keras name, or an empty string if none is close."""
    return nearest(name, _MODULES[kind][1])


def _instantiate(key: str, name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    # A user's class may raise any exception.
    except Exception as error:
        raise ConfigError(
            f"{key}: {name} cannot be created without arguments: {user_code.format_error(error)}; "
            "write a function that returns an instance, and use package.module:function"
        ) from error
