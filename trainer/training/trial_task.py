"""Try a learning task of the user's on made-up examples: `trainer.tasks.base.Task` says what holds.

It would otherwise fail where it is asked first: in the evaluation, in the export,
or not at all, with metrics that workers cannot add up. No model is needed for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf

from trainer import user_code
from trainer.errors import ConfigError, nearest
from trainer.statistics.statistics import Feature
from trainer.tasks.base import Array, Direction, Part, Target, Task
from trainer.tasks.objective import LOSS, Objective

BUILT_IN = "trainer.tasks."
_EXAMPLES = 8
# Of what varies in length.
_SOME_PLACES = 3
_DIRECTIONS = get_args(Direction)
# Sums in single precision, of values of any size.
_CLOSE = 1e-3
_SHAPES = {
    "tables": {"title", "columns", "rows"},
    "charts": {"title", "x", "y", "series"},
}


@dataclass(frozen=True)
class _MadeUp:
    """Examples in two parts, of which an evaluation has any number."""

    whole: Part
    count: int = _EXAMPLES

    def parts(self) -> Iterator[Part]:
        """Read them."""
        for rows in (slice(0, 3), slice(3, None)):
            yield _at(self.whole, rows)


def require(task: Task, features: Mapping[str, Feature]) -> None:
    """Raise `ConfigError` where a task of the user's, or one of several, does not keep to it.

    Args:
        task: those built in are left out; tests hold them to it.
        features: of the dataset.
    """
    for name, part in task.parts.items():
        if not type(part).__module__.startswith(BUILT_IN):
            where = f"task.outputs.{name}" if name else "task"
            with _named(f"{where} {type(part).__module__}:{type(part).__name__}"):
                require_kept(part, features)


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error.__cause__


def require_kept(task: Task, features: Mapping[str, Feature]) -> None:
    """Raise `ConfigError` where a task of one output does not keep to its contract."""
    _require_said(task)
    examples = _MadeUp(_examples(task, features))
    _require_loss(task, examples.whole)
    _require_metrics(task, examples)
    _require_answers(task, examples.whole.outputs)
    _require_displayed(task, examples)


def _require_said(task: Task) -> None:
    """Refuse attributes of the class that are missing, or say nothing."""
    for name, kind in (("name", str), ("main_metric", str), ("directions", Mapping)):
        if not isinstance(getattr(task, name, None), kind):
            example = "a mapping from metric to direction" if kind is Mapping else "a text"
            raise ConfigError(f"its attribute {name} has to be {example}")
    for metric, direction in task.directions.items():
        if direction is not None and direction not in _DIRECTIONS:
            hint = nearest(str(direction), _DIRECTIONS)
            raise ConfigError(
                f"directions: that of {metric!r} is {direction!r}; it has to be "
                f"{' or '.join(map(repr, _DIRECTIONS))}, or None where neither is better{hint}"
            )
    if {LOSS: "lower", **task.directions}.get(task.main_metric) is None:
        hint = nearest(task.main_metric, task.directions)
        raise ConfigError(f"directions: that of main_metric {task.main_metric!r} is missing{hint}")
    shape = _called("output_shape", lambda: task.output_shape)
    if not isinstance(shape, tuple) or not all(isinstance(size, int) for size in shape):
        raise ConfigError(f"output_shape is {shape!r}; it has to be a tuple of whole numbers")
    cost = _called("chance_loss", task.chance_loss)
    if not isinstance(cost, float | int) or not (math.isfinite(cost) and cost > 0):
        raise ConfigError(f"chance_loss() is {cost!r}; it has to be a number above zero")


def _require_loss(task: Task, whole: Part) -> None:
    loss = _called("loss", task.loss)
    if not isinstance(loss, keras.losses.Loss):
        raise ConfigError(f"loss() is a {type(loss).__name__}; it has to be a keras.losses.Loss")

    def call() -> Any:
        labels = task.loss_labels(tf.constant(whole.labels))
        return tf.convert_to_tensor(loss.call(labels, task.given(tf.constant(whole.outputs))))

    each = _called("loss", call)
    if each.shape.rank == 0 or each.shape[0] != _EXAMPLES:
        raise ConfigError(
            f"its loss gives a value of shape {tuple(each.shape)} for {_EXAMPLES} examples: call() "
            "has to return one for each, which weights of examples count"
        )
    of_each = _called("example_losses", lambda: task.example_losses(whole.labels, whole.outputs))
    if np.shape(of_each) != (_EXAMPLES,):
        raise ConfigError(
            f"example_losses() has shape {np.shape(of_each)} for {_EXAMPLES} examples; it has to "
            f"be ({_EXAMPLES},)"
        )


def _require_metrics(task: Task, examples: _MadeUp) -> None:
    """Refuse metrics that are not named, or that parts of the examples do not add up to."""
    metrics = _called("metrics", task.metrics)
    for each in metrics:
        if not isinstance(each, keras.Metric):
            kind = type(each).__name__
            raise ConfigError(f"metrics() has a {kind}; all of it has to be a keras.Metric")
    objective = Objective(task)
    at_once, *parts = _called(
        "metrics", lambda: [objective.sums(each) for each in (examples.whole, *examples.parts())]
    )
    found = objective.means(at_once)
    for name in found:
        if name not in {LOSS, *task.directions}:
            hint = nearest(name, task.directions)
            raise ConfigError(f"directions: it measures {name!r}, which they do not have{hint}")
    added = objective.means(np.sum(parts, axis=0))
    for name, value in found.items():
        other = added.get(name, math.nan)
        if not np.isclose(value, other, rtol=_CLOSE, atol=_CLOSE):
            raise ConfigError(
                f"its {'loss' if name == LOSS else f'metric {name!r}'} of {_EXAMPLES} examples is "
                f"{value:g}, and {other:g} where its states over two parts of them are added: "
                "a state has to be a sum over the examples, a loss the mean"
            )


def _require_answers(task: Task, outputs: Array) -> None:
    answers = _called("answers", lambda: tf.function(task.answers)(tf.constant(outputs)))
    if not isinstance(answers, Mapping) or not answers:
        raise ConfigError("answers() has to return tensors by the name of a column")
    for name, each in answers.items():
        if not isinstance(each, tf.Tensor) or each.shape[:1] != [_EXAMPLES]:
            raise ConfigError(
                f"answers(): the first axis of {name!r} has to be that of the outputs, the examples"
            )
    arrays = {name: each.numpy() for name, each in answers.items()}
    again = _called("outputs_of", lambda: np.asarray(task.outputs_of(arrays), np.float32))
    before = _called("predictions", lambda: np.asarray(task.predictions(outputs)))
    after = _called("predictions", lambda: np.asarray(task.predictions(again)))
    if before.shape != after.shape or not np.allclose(before, after, rtol=_CLOSE, atol=_CLOSE):
        raise ConfigError(
            "outputs_of(answers(outputs)) gives other predictions than the outputs: a champion, "
            "of which only the answers are known, would be measured as another model"
        )


def _require_displayed(task: Task, examples: _MadeUp) -> None:
    """Refuse what no report could draw."""
    whole = examples.whole
    cells = _called("described", lambda: task.described(whole.labels[0], whole.outputs[0]))
    if lacking := {"label", "predicted"}.difference(cells):
        raise ConfigError(f"described() has no {' and no '.join(sorted(lacking))}")
    _require_plain("described", cells)
    details = _called("details", lambda: task.details(examples))
    _require_plain("details", details)
    for kind, keys in _SHAPES.items():
        for each in details.get(kind, ()):
            if lacking := keys.difference(each):
                raise ConfigError(f"details(): one of {kind} has no {' and no '.join(lacking)}")

    def tallied() -> dict[str, Any]:
        tally = task.tally()
        tally.add(whole)
        return tally.result()

    tally = _called("tally", tallied)
    _require_plain("tally", tally)
    for where, found in (("details", details), ("tally", tally)):
        for name in found.get("metrics", {}):
            if name not in task.directions:
                hint = nearest(name, task.directions)
                raise ConfigError(f"directions: {where}() measures {name!r}{hint}")


def _require_plain(what: str, tree: Any) -> None:
    try:
        json.dumps(tree, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what}() has to be plain data, with finite numbers of Python's own: {error}"
        ) from error


def _called(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    # Code of the user's may fail in any way.
    except Exception as error:
        raise ConfigError(f"{what}() fails: {user_code.line_of(error)}") from error


def _examples(task: Task, features: Mapping[str, Feature]) -> Part:
    random = np.random.default_rng(0)
    labels = _labels(task.target, random)
    # An axis of any size is as long as the label's.
    known = dict(enumerate(labels.shape[1:]))
    sizes = [
        size if size > 0 else known.get(axis, 2) for axis, size in enumerate(task.output_shape)
    ]
    outputs = random.normal(size=(_EXAMPLES, *sizes)).astype(np.float32)
    weights = random.uniform(0.5, 2, _EXAMPLES).astype(np.float32)
    columns = {
        name: np.zeros(
            (_EXAMPLES, *(size or 1 for size in features[name].shape)), _dtype(features[name].dtype)
        )
        for name in task.columns
    }
    return Part(labels, outputs, weights, columns)


def _labels(target: Target, random: np.random.Generator) -> Array:
    """Return labels within what is known of them."""
    sizes = (_SOME_PLACES if size < 0 else size for size in target.shape)
    shape, dtype = (_EXAMPLES, *sizes), _dtype(target.dtype)
    if target.num_classes:
        return (np.arange(math.prod(shape)).reshape(shape) % target.num_classes).astype(dtype)
    if dtype.kind not in "iuf":
        return (np.arange(math.prod(shape)).reshape(shape) % 2).astype(dtype)
    low, high = target.moments.get("min", 0.0), target.moments.get("max", 1.0)
    values = random.uniform(low, high, shape)
    return (values if dtype.kind == "f" else np.round(values)).astype(dtype)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(object if name == "string" else name)


def _at(part: Part, rows: slice) -> Part:
    columns = {name: each[rows] for name, each in part.columns.items()}
    weights = None if part.weights is None else part.weights[rows]
    return Part(part.labels[rows], part.outputs[rows], weights, columns)
