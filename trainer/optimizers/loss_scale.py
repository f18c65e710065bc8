"""The scale of a float16 loss: small gradients would be zero in float16, and large ones infinite.

The loss is multiplied before the gradient and the gradient divided after it (Micikevicius et al.
2018, "Mixed Precision Training", section 3.2), with the rule of Keras's `LossScaleOptimizer`: half
the scale where a gradient is not finite, twice the scale after `GROWTH` updates without.

Keras skips a step whose gradient is not finite. Here it is computed again from the same batch with
half the scale, so that every batch counts, and so does every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

# What their paths in a checkpoint begin with.
LOSS_SCALE = "loss_scale/"
FIRST = 2.0**15
GROWTH = 2000
# A scale has no end where all gradients are zero; the largest number of float32 is near 2**128.
LARGEST = 2.0**60
# From the largest scale down to one that shrinks: then the gradient itself is not finite.
MOST_HALVINGS = 64


class _Value(NamedTuple):
    """A variable, as Keras's have it; `join` makes one value of those of several towers."""

    value: tf.Variable
    path: str
    join: Callable[[Any], tf.Tensor]


class LossScale:
    """The scale, the number of gradients, and at which of them it was changed: state of a model.

    The number is added to, and the rest is assigned, so that the count is right where workers race.
    """

    def __init__(self, *, gradients: int = 1, **options: Any) -> None:
        """Make the variables on the device of the scope; `gradients` of them make an update."""
        self._growth = GROWTH * gradients
        self._scale = tf.Variable(FIRST, trainable=False, name="loss_scale", **options)
        self._count = tf.Variable(0, trainable=False, name="gradients", dtype=tf.int64, **options)
        self._changed = tf.Variable(
            0.0, trainable=False, name="changed", dtype=tf.float64, **options
        )

    @property
    def variables(self) -> list[_Value]:
        """The scale, the count, and where it was changed; the last ones of a state."""
        # A scale that is too large for one tower is too large.
        joins = tf.reduce_min, tf.reduce_max, tf.reduce_max
        return [
            _Value(variable, path, join)
            for (path, variable), join in zip(self.named.items(), joins, strict=True)
        ]

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables as a checkpoint has them."""
        named = {"scale": self._scale, "gradients": self._count, "changed": self._changed}
        return {f"{LOSS_SCALE}{name}": variable for name, variable in named.items()}

    def over(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function with a scale, whose variables are the last of its state."""

        def scaled(weights: Any, state: Any, batch: Any) -> Any:
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
            # By a power of two, which changes no digit.
            found = [_over(each, scale) for each in found]
            count += 1
            at = tf.cast(count, changed.dtype)
            halved, grown = halvings > 0, at - changed >= self._growth
            changed = tf.where(tf.logical_or(halved, grown), at, changed)
            larger = tf.minimum(scale * 2, LARGEST)
            scale = tf.where(tf.logical_and(grown, tf.logical_not(halved)), larger, scale)
            return value, found, [*after, scale, count, changed]

        return scaled


def _all_finite(gradients: list[Any]) -> tf.Tensor:
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])


def _over(gradient: Any, scale: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / scale, gradient.indices, gradient.dense_shape)
    return gradient / scale
