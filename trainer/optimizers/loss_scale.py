"""The loss scale for float16, which prevents gradients from underflowing to zero or overflowing.

The loss is multiplied by the scale, and its gradient is divided by the scale (Micikevicius et al.
2018, "Mixed Precision Training", section 3.2). As in Keras's `LossScaleOptimizer`, the scale is
halved if a gradient is not finite, and doubled after `GROWTH` updates with finite gradients.

Keras skips a step whose gradient is not finite. Here the gradient is computed again for the same
batch with half the scale, so that no batch and no step is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

# Prefix of the checkpoint paths of the loss scale's variables.
LOSS_SCALE = "loss_scale/"
FIRST = 2.0**15
GROWTH = 2000
# Maximum scale. Without it, the scale would exceed the largest float32, about 2**128, if gradients
# stayed zero.
LARGEST = 2.0**60
# Maximum number of halvings. They reduce any scale to less than 1. If a gradient is still not
# finite, the scale is not the cause.
MOST_HALVINGS = 64


class _Value(NamedTuple):
    """A variable with Keras's attributes. `join` merges its values on several towers."""

    value: tf.Variable
    path: str
    join: Callable[[Any], tf.Tensor]


class LossScale:
    """The loss scale, the number of gradients so far, and that number at the last scale change.

    The number of gradients is incremented, so that it is exact even if several workers write at the
    same time. The other two variables are assigned.
    """

    def __init__(self, *, gradients: int = 1, **options: Any) -> None:
        """Create the variables on the current device. Each update uses `gradients` gradients."""
        self._growth = GROWTH * gradients
        self._scale = tf.Variable(FIRST, trainable=False, name="loss_scale", **options)
        self._count = tf.Variable(0, trainable=False, name="gradients", dtype=tf.int64, **options)
        self._changed = tf.Variable(
            0.0, trainable=False, name="changed", dtype=tf.float64, **options
        )

    @property
    def variables(self) -> list[_Value]:
        """The variables, in the order that `wrap` expects at the end of a model's state."""
        # Take the lowest scale: if a scale is too large for one tower, all towers must lower it.
        joins = tf.reduce_min, tf.reduce_max, tf.reduce_max
        return [
            _Value(variable, path, join)
            for (path, variable), join in zip(self.named.items(), joins, strict=True)
        ]

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables by checkpoint path."""
        named = {"scale": self._scale, "gradients": self._count, "changed": self._changed}
        return {f"{LOSS_SCALE}{name}": variable for name, variable in named.items()}

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compute` with loss scaling. Its state must end with the scale's variables."""

        def compute_scaled(weights: Any, state: Any, batch: Any) -> Any:
            *state, first, count, changed = state
            value, found, after = compute(weights, state, batch, first)
            moving = [i for i, old in enumerate(state) if after[i] is not old]

            def too_large(halvings: tf.Tensor, _: Any, value: Any, found: Any, __: Any) -> Any:
                is_gradient = tf.math.is_finite(value) & ~_all_finite(found)
                return (halvings < MOST_HALVINGS) & is_gradient

            def halve(halvings: tf.Tensor, scale: tf.Tensor, *_: Any) -> tuple[Any, ...]:
                return halvings + 1, scale / 2, *compute(weights, state, batch, scale / 2)

            halvings, scale, value, found, after = tf.while_loop(
                too_large, halve, (tf.constant(0), first, value, found, after)
            )
            after = [after[i] if i in moving else old for i, old in enumerate(state)]
            # The division is exact, because the scale is a power of two.
            found = [_divide(each, scale) for each in found]
            count += 1
            at = tf.cast(count, changed.dtype)
            halved, grown = halvings > 0, at - changed >= self._growth
            changed = tf.where(tf.logical_or(halved, grown), at, changed)
            larger = tf.minimum(scale * 2, LARGEST)
            scale = tf.where(tf.logical_and(grown, tf.logical_not(halved)), larger, scale)
            return value, found, [*after, scale, count, changed]

        return compute_scaled


def _all_finite(gradients: list[Any]) -> tf.Tensor:
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])


def _divide(gradient: Any, scale: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)
    return gradient / scale
