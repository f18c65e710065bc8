"""The check of a user's learning task against the contract of `flotilla.trainer.tasks.base.Task`.

The check runs the task on artificial examples. Without it, an error would appear only in the
export, or as metrics that do not add up.
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

from flotilla.trainer.config.main_metric import LOSS
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.tasks.base import Array, Direction, Part, Target, Task
from flotilla.trainer.tasks.objective import Objective

BUILT_IN = "flotilla.trainer.tasks."
# The number of artificial examples, and the length of features of variable length.
EXAMPLES, LENGTH = 8, 4
# The relative tolerance for sums in single precision.
_CLOSE = 1e-3
_DISPLAYED = {"tables": {"title", "columns", "rows"}, "charts": {"title", "x", "y", "series"}}


@dataclass(frozen=True)
class _MadeUp:
    """Artificial examples. `parts` splits them in two, like an evaluation with several parts."""

    whole: Part
    count: int = EXAMPLES

    def parts(self) -> Iterator[Part]:
        whole = self.whole
        for rows in (slice(0, 3), slice(3, None)):
            columns = {name: each[rows] for name, each in whole.columns.items()}
            weights = None if whole.weights is None else whole.weights[rows]
            yield Part(whole.labels[rows], whole.outputs[rows], weights, columns)


def require_task(task: Task, features: Mapping[str, FeatureSpec]) -> None:
    """Raise `ConfigError` if a user's task, or the task of one output, breaks the contract."""
    for name, part in task.parts.items():
        if not is_built_in(part):
            where = f"task.outputs.{name}" if name else "task"
            with prefix_errors(f"{where} {type(part).__module__}:{type(part).__name__}"):
                require_contract(part, features)


def is_built_in(task: Task) -> bool:
    """Return whether a task is built in."""
    return type(task).__module__.startswith(BUILT_IN)


@contextmanager
def prefix_errors(what: str) -> Iterator[None]:
    """Prefix the message of a `ConfigError` with `what`."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{what}: {error}") from error.__cause__


def call_user_code(what: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call a user's code, and convert any error to a `ConfigError`."""
    try:
        return call(*args)
    except UserError:
        raise
    # A user's code may raise any exception.
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} failed: {user_code.format_error(error)}") from error


def _require(holds: Any, otherwise: str) -> None:
    if not holds:
        raise ConfigError(otherwise)


def require_contract(task: Task, features: Mapping[str, FeatureSpec]) -> None:
    """Raise `ConfigError` if the task of one output breaks its contract."""
    _require_attributes(task)
    examples = _MadeUp(_task_examples(task, features))
    _require_loss(task, examples.whole)
    _require_metrics(task, examples)
    _require_answers(task, examples.whole.outputs)
    _require_displayed(task, examples)


def _require_attributes(task: Task) -> None:
    for name, kind in (("name", str), ("main_metric", str), ("directions", Mapping)):
        example = "a mapping from metric to direction" if kind is Mapping else "a string"
        holds = isinstance(getattr(task, name, None), kind)
        _require(holds, f"its attribute {name} must be {example}")
    allowed = get_args(Direction)
    for metric, direction in task.directions.items():
        _require(
            direction is None or direction in allowed,
            f"directions: the direction of {metric!r} is {direction!r}; it must be "
            f"{' or '.join(map(repr, allowed))}, or None if neither is "
            f"better{nearest(str(direction), allowed)}",
        )
    _require(
        {LOSS: "lower", **task.directions}.get(task.main_metric),
        f"directions: the direction of main_metric {task.main_metric!r} is missing"
        f"{nearest(task.main_metric, task.directions)}",
    )
    shape = call_user_code("output_shape()", lambda: task.output_shape)
    _require(
        isinstance(shape, tuple) and all(isinstance(size, int) for size in shape),
        f"output_shape is {shape!r}; it must be a tuple of whole numbers",
    )
    cost = call_user_code("chance_loss()", task.chance_loss)
    _require(
        isinstance(cost, float | int) and math.isfinite(cost) and cost > 0,
        f"chance_loss() is {cost!r}; it must be a number above zero",
    )


def _require_loss(task: Task, whole: Part) -> None:
    loss = call_user_code("loss()", task.loss)
    is_loss = isinstance(loss, keras.losses.Loss)
    _require(is_loss, f"loss() returns a {type(loss).__name__}, not a keras.losses.Loss")

    def call() -> Any:
        labels = task.loss_labels(tf.constant(whole.labels))
        return tf.convert_to_tensor(loss.call(labels, task.given(tf.constant(whole.outputs))))

    each = call_user_code("loss()", call)
    _require(
        each.shape.rank and each.shape[0] == EXAMPLES,
        f"its loss returns a value of shape {tuple(each.shape)} for {EXAMPLES} examples: call() "
        "must return one value per example, so that example weights apply",
    )
    losses = call_user_code("example_losses()", task.example_losses, whole.labels, whole.outputs)
    _require(
        np.shape(losses) == (EXAMPLES,),
        f"example_losses() has shape {np.shape(losses)} for {EXAMPLES} examples; it must be "
        f"({EXAMPLES},)",
    )


def _require_metrics(task: Task, examples: _MadeUp) -> None:
    """Reject metrics without a direction, or whose states do not add up over parts."""
    for each in call_user_code("metrics()", task.metrics):
        kind = type(each).__name__
        is_metric = isinstance(each, keras.Metric)
        _require(is_metric, f"metrics() contains a {kind}; each item must be a keras.Metric")
    objective = Objective(task)
    at_once, *parts = (
        call_user_code("metrics()", objective.sums, each)
        for each in (examples.whole, *examples.parts())
    )
    found, added = objective.means(at_once), objective.means(np.sum(parts, axis=0))
    _require_directions(task, {name: name for name in found if name != LOSS}, "the task")
    for name, value in found.items():
        other = added.get(name, math.nan)
        _require(
            np.isclose(value, other, rtol=_CLOSE, atol=_CLOSE),
            f"its {'loss' if name == LOSS else f'metric {name!r}'} of {EXAMPLES} examples is "
            f"{value:g}, but {other:g} if they are evaluated in two parts; a state must be a sum "
            "over the examples, and a loss must be a mean over them",
        )


def _require_directions(task: Task, metrics: Mapping[str, Any], who: str) -> None:
    for name in metrics:
        _require(
            name in task.directions,
            f"directions: {who} measures {name!r}, which has no direction"
            f"{nearest(name, task.directions)}",
        )


def _require_answers(task: Task, outputs: Array) -> None:
    answers = call_user_code("answers()", lambda: tf.function(task.answers)(tf.constant(outputs)))
    is_named = isinstance(answers, Mapping) and answers
    _require(is_named, "answers() must return a mapping from column names to tensors")
    for name, each in answers.items():
        _require(
            isinstance(each, tf.Tensor) and each.shape[:1] == [EXAMPLES],
            f"answers(): the first axis of {name!r} must have one entry for each example",
        )
    arrays = {name: each.numpy() for name, each in answers.items()}
    again = call_user_code("outputs_of()", lambda: np.asarray(task.outputs_of(arrays), np.float32))
    before, after = (
        call_user_code("predictions()", lambda each: np.asarray(task.predictions(each)), each)
        for each in (outputs, again)
    )
    _require(
        before.shape == after.shape and np.allclose(before, after, rtol=_CLOSE, atol=_CLOSE),
        "outputs_of(answers(outputs)) must give the same predictions as the outputs, because a "
        "champion is evaluated from its answers",
    )


def _require_displayed(task: Task, examples: _MadeUp) -> None:
    whole = examples.whole
    cells = call_user_code("described()", task.described, whole.labels[0], whole.outputs[0])
    lacking = {"label", "predicted"}.difference(cells)
    _require(not lacking, f"the result of described() lacks {' and '.join(sorted(lacking))}")
    details = call_user_code("details()", task.details, examples)
    for kind, keys in _DISPLAYED.items():
        for each in details.get(kind, ()):
            lacking = keys.difference(each)
            _require(not lacking, f"details(): an entry of {kind} lacks {' and '.join(lacking)}")

    def run_tally() -> dict[str, Any]:
        tally = task.tally()
        tally.add(whole)
        return tally.result()

    tally = call_user_code("tally()", run_tally)
    for what, tree in (("described()", cells), ("details()", details), ("tally()", tally)):
        _require_plain(what, tree)
        _require_directions(task, tree.get("metrics", {}), what)


def _require_plain(what: str, tree: Any) -> None:
    try:
        json.dumps(tree, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} must be plain data with finite Python numbers: {error}"
        ) from error


def _task_examples(task: Task, features: Mapping[str, FeatureSpec]) -> Part:
    random = np.random.default_rng(0)
    labels = _labels(task.target, random)
    # If the size of an output axis is not fixed, use the size of the same axis of the label.
    known = dict(enumerate(labels.shape[1:]))
    sizes = [
        size if size > 0 else known.get(axis, 2) for axis, size in enumerate(task.output_shape)
    ]
    outputs = random.normal(size=(EXAMPLES, *sizes)).astype(np.float32)
    weights = random.uniform(0.5, 2, EXAMPLES).astype(np.float32)
    columns = {
        name: np.zeros(
            (EXAMPLES, *(size or 1 for size in features[name].shape)), _dtype(features[name].dtype)
        )
        for name in task.columns
    }
    return Part(labels, outputs, weights, columns)


def number_rows(shape: tuple[int, ...], dtype: np.dtype[Any], count: int = 2) -> Array:
    """Return an array that repeats the whole numbers from 0 to `count - 1`."""
    return (np.arange(math.prod(shape)).reshape(shape) % count).astype(dtype)


def _labels(target: Target, random: np.random.Generator) -> Array:
    shape = (EXAMPLES, *(LENGTH if size < 0 else size for size in target.shape))
    dtype = _dtype(target.dtype)
    if target.num_classes or dtype.kind not in "iuf":
        return number_rows(shape, dtype, target.num_classes or 2)
    values = random.uniform(target.moments.get("min", 0.0), target.moments.get("max", 1.0), shape)
    return (values if dtype.kind == "f" else np.round(values)).astype(dtype)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(object if name == "string" else name)
