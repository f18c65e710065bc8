"""Weights of classes in training: each example weighs what its class weighs, as in Keras's `fit`.

Of a task with several labels for one example, a class weighs where an example has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.config.schema import BALANCED
from trainer.errors import ConfigError, nearest
from trainer.tasks.base import Array, Task

# As many names of classes as a message shows.
_SOME = 5
_KEY = "training.class_weights"


def table(given: str | Mapping[str, float], task: Task) -> Array | None:
    """Return the weight of each class [classes]; None where all weigh the same.

    `balanced` weighs a class by `examples / (classes * examples of the class)` of the training
    split, so that all classes weigh the same together; before it is prepared that is None.

    Raises:
        ConfigError: the task has no classes, or no such class; a class has no example.
    """
    if not given:
        return None
    names = task.labels
    if not names:
        raise ConfigError(f"{_KEY}: {task.name} of {task.target} has no classes that could weigh")
    if isinstance(given, str):
        return _balanced(task, names)
    weights = np.ones(len(names), np.float32)
    for name, weight in given.items():
        weights[_number(name, names)] = weight
    return weights


def applied(weights: Array, task: Task, labels: Any, examples: Any) -> tf.Tensor:
    """Return the weights of a batch, from its labels and the weights of its examples or None.

    They have the shape of the labels.
    """
    each = tf.constant(weights)
    if len(task.target.shape) == 1 and task.link == "sigmoid":
        found = tf.where(tf.cast(labels, tf.bool), each, tf.ones_like(each))
    else:
        # Below zero is padding, which a mask leaves out of the loss.
        found = tf.gather(each, tf.maximum(tf.cast(labels, tf.int32), 0))
    if examples is None:
        return found
    more = [1] * (found.shape.rank - examples.shape.rank)
    return found * tf.reshape(tf.cast(examples, tf.float32), [*_sizes(examples), *more])


def _sizes(examples: Any) -> list[Any]:
    return list(tf.unstack(tf.shape(examples)))


def _balanced(task: Task, names: Sequence[str]) -> Array | None:
    if not task.target.counts:
        return None
    counts = np.asarray(task.target.counts["train"], np.float64)
    if len(counts) != len(names) or task.target.shape:
        raise ConfigError(
            f"{_KEY}: {BALANCED} needs one class an example, and {task.name} of {task.target} has "
            "several; give a weight for each class"
        )
    if lacking := [name for name, count in zip(names, counts, strict=True) if not count]:
        raise ConfigError(
            f"{_KEY}: {BALANCED} has no weight for {', '.join(map(repr, lacking[:3]))}, of which "
            "the training split has no example; give a weight for each class"
        )
    found: Array = (counts.sum() / (len(counts) * counts)).astype(np.float32)
    return found


def _number(name: str, names: Sequence[str]) -> int:
    if name in names:
        return names.index(name)
    if name.isascii() and name.isdigit() and int(name) < len(names):
        return int(name)
    some = ", ".join(names[:_SOME]) + (", ..." if len(names) > _SOME else "")
    hint = nearest(name, names) or f" (the classes are {some})"
    raise ConfigError(f"{_KEY}: there is no class {name!r}{hint}")
