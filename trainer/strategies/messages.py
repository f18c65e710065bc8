"""Values that travel together: one message for each server and type, in each direction.

A message costs more than the bytes in it: a perceptron of four variables is pulled in one piece and
its gradient pushed in one piece. The variables themselves stay as they are, so that every
optimizer, checkpoint and placement works as without.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class Messages:
    """How the values of a list of variables travel; used inside of `tf.function`."""

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        """Sort the variables by the device on which they stand, and by their type."""
        self._variables = list(variables)
        self._together: dict[tuple[str, tf.DType], list[int]] = {}
        for index, variable in enumerate(self._variables):
            self._together.setdefault((variable.device, variable.dtype), []).append(index)

    def pulled(self) -> list[tf.Tensor]:
        """Return the values of all variables, on the device of the scope."""
        values: list[tf.Tensor] = [None] * len(self._variables)
        for (device, _), indices in self._together.items():
            with tf.device(device):
                packed = _packed([self._variables[i].read_value() for i in indices])
            self._unpack(packed, indices, values)
        return values

    def pushed(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return values that were computed here, each on the device of its variable."""
        arrived: list[tf.Tensor] = [None] * len(self._variables)
        for (device, dtype), indices in self._together.items():
            packed = _packed([tf.cast(values[i], dtype) for i in indices])
            with tf.device(device):
                self._unpack(packed, indices, arrived)
        return arrived

    def _unpack(self, packed: tf.Tensor, indices: list[int], into: list[tf.Tensor]) -> None:
        if len(indices) == 1:
            into[indices[0]] = packed
            return
        shapes = [self._variables[i].shape for i in indices]
        parts = tf.split(packed, [shape.num_elements() for shape in shapes])
        for index, shape, part in zip(indices, shapes, parts, strict=True):
            into[index] = tf.reshape(part, shape)


def _packed(values: list[tf.Tensor]) -> tf.Tensor:
    if len(values) == 1:
        # As it is; the identity marks the device on which it is wanted.
        return tf.identity(values[0])
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)
