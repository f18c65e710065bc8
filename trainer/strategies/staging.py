"""Gradients that wait on the parameter servers until it is decided whether they count.

Each variable's gradient waits on the server of that variable, all of one gradient's parts under one
number, in TensorFlow's keyed staging area. Nothing is added to anything before, so a gradient of
which only a part has come, because its worker was killed, never counts in part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# A dense tensor, `IndexedSlices` of the rows that were looked up, or None of an unused variable.
Gradient = Any


class Staging:
    """A place for whole gradients of one list of variables, used inside of `tf.function`."""

    def __init__(self, variables: Sequence[tf.Variable], name: str) -> None:
        """Make a place; the name is its own, also among those of other lives of the chief."""
        self._variables = variables
        self._name = name
        self._sparse: list[bool | None] = []

    def put(self, number: tf.Tensor, gradients: Sequence[Gradient]) -> list[tf.Operation]:
        """Send a gradient to the servers; it is there when all operations returned are done."""
        self._sparse = [
            None if each is None else isinstance(each, tf.IndexedSlices) for each in gradients
        ]
        sent = []
        for device, indices in self._by_device().items():
            values = [part for i in indices for part in _parts(gradients[i])]
            with tf.device(device):
                sent.append(
                    tf.raw_ops.MapStage(
                        key=number,
                        indices=tf.range(len(values)),
                        values=values,
                        dtypes=[value.dtype for value in values],
                        shared_name=self._name,
                    )
                )
        return sent

    def take(self, number: tf.Tensor) -> list[Gradient]:
        """Return a gradient that is there, and keep it no longer.

        Whether rows or whole tensors come is known once `put` has been traced.
        """
        gradients: list[Gradient] = [None] * len(self._variables)
        for device, indices in self._by_device().items():
            dtypes = [dtype for i in indices for dtype in self._dtypes(i)]
            with tf.device(device):
                values = tf.raw_ops.MapUnstage(
                    key=number,
                    indices=tf.range(len(dtypes)),
                    dtypes=dtypes,
                    shared_name=self._name,
                )
                parts = iter(values)
                for i in indices:
                    gradients[i] = self._whole(i, [next(parts) for _ in self._dtypes(i)])
        return gradients

    def _by_device(self) -> dict[str, list[int]]:
        """Return the variables that have a gradient, by the server on which they stand."""
        found: dict[str, list[int]] = {}
        for index, (variable, sparse) in enumerate(zip(self._variables, self._sparse, strict=True)):
            if sparse is not None:
                found.setdefault(variable.device, []).append(index)
        return found

    def _dtypes(self, index: int) -> list[tf.DType]:
        dtype = self._variables[index].dtype
        return [dtype, tf.int64] if self._sparse[index] else [dtype]

    def _whole(self, index: int, parts: list[tf.Tensor]) -> Gradient:
        shape = self._variables[index].shape
        if not self._sparse[index]:
            return tf.ensure_shape(parts[0], shape)
        values = tf.ensure_shape(parts[0], [None, *shape[1:]])
        rows = tf.ensure_shape(parts[1], [None])
        return tf.IndexedSlices(values, rows, tf.constant(shape.as_list(), tf.int64))


def added(one: list[Gradient], other: list[Gradient]) -> list[Gradient]:
    """Return the sum of two gradients; rows stay rows."""
    return [_plus(a, b) for a, b in zip(one, other, strict=True)]


def divided(gradient: list[Gradient], count: int) -> list[Gradient]:
    """Return a gradient over a number."""
    return [_over(each, count) for each in gradient]


def _parts(gradient: Gradient) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, tf.cast(gradient.indices, tf.int64)]
    return [gradient]


def _plus(one: Gradient, other: Gradient) -> Gradient:
    if one is None:
        return None
    if isinstance(one, tf.IndexedSlices):
        values = tf.concat([one.values, other.values], 0)
        rows = tf.concat([one.indices, other.indices], 0)
        return tf.IndexedSlices(values, rows, one.dense_shape)
    return one + other


def _over(gradient: Gradient, count: int) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / count, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / count
