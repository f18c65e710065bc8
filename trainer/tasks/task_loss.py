"""The loss of a task, which replaces Keras's loss container and its scaling.

Keras divides a loss by the number of replicas, because it sums the gradients of all replicas. Here,
gradients are averaged, so the loss is the mean over the batch.

Class weights apply only in training, as in Keras's `fit`. If an example has several labels, each
label has a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from flotilla.trainer.config.schema import BALANCED
from flotilla.trainer.features.class_names import ClassIndex, normalize_number
from flotilla.trainer.runtime.errors import ConfigError, nearest
from flotilla.trainer.tasks.base import Array, Task
from flotilla.trainer.tasks.compiled import Term

# Maximum number of class names in a message.
_SOME = 5


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


def attach(model: keras.Model, loss: TaskLoss) -> None:
    """Make a model use this loss."""
    model._compile_loss = loss
    model._aggregate_additional_loss = _cast_layer_loss


def _cast_layer_loss(loss: Any) -> tf.Tensor:
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


def class_weights(given: str | Mapping[str, float], task: Task, key: str) -> Array | None:
    """Return the weight of each class of a label [classes], or None without class weights.

    `balanced` gives each class the weight `examples / (classes * examples of the class)`, counted
    in the training split, so that all classes have the same total weight. Before preparation, the
    counts are unknown and the result is None.

    Raises:
        ConfigError: the task has no classes, a class is unknown, or a class has no examples. The
            message starts with `key`.
    """
    if not given:
        return None
    try:
        names = task.labels
        if not names:
            raise ConfigError(f"{task.name} of {task.target} has no classes to weight")
        if isinstance(given, str):
            return _balance_classes(task, names)
        weights = np.ones(len(names), np.float32)
        for name, weight in given.items():
            weights[_number(name, names)] = weight
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    return weights


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
    return found * tf.reshape(tf.cast(examples, tf.float32), [*_sizes(examples), *more])


def _sizes(examples: Any) -> list[Any]:
    return list(tf.unstack(tf.shape(examples)))


def _balance_classes(task: Task, names: Sequence[str]) -> Array | None:
    if not task.target.counts:
        return None
    counts = np.asarray(task.target.counts["train"], np.float64)
    if len(counts) != len(names) or task.target.shape:
        raise ConfigError(
            f"{BALANCED!r} needs one class per example, but {task.name} of {task.target} has "
            "several; set a weight for each class"
        )
    if lacking := [name for name, count in zip(names, counts, strict=True) if not count]:
        raise ConfigError(
            f"{BALANCED!r} needs training examples of each class, but there are none of "
            f"{', '.join(map(repr, lacking[:3]))}; set a weight for each class"
        )
    found: Array = (counts.sum() / (len(counts) * counts)).astype(np.float32)
    return found


def _number(name: str, names: Sequence[str]) -> int:
    if (found := ClassIndex(names).number(name)) >= 0:
        return found
    by_place = name.isascii() and name.isdigit() and not any(map(normalize_number, names))
    if by_place and int(name) < len(names):
        return int(name)
    some = ", ".join(names[:_SOME]) + (", ..." if len(names) > _SOME else "")
    hint = nearest(name, names) or f" (the classes are {some})"
    raise ConfigError(f"there is no class {name!r}{hint}")
