"""A layer from numbers to those with a mean of 0 and a variance of 1, by constants of the graph.

A float32 has 7 digits. Seconds since 1970, or ids, differ in their last ones, which are gone when a
layer of Keras gets them: its inputs are cast first. Here the mean is taken away in the type that
the numbers came in, and only what is left becomes a float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# What is further away is no value that any model has seen, and must not overflow.
_FAR = 2**62


@keras.saving.register_keras_serializable(package="flotilla")
class Normalization(keras.layers.Layer):
    """Numbers of any type to floats; one that is missing, NaN, stays so."""

    def __init__(
        self, mean: float | Sequence[float], std: float | Sequence[float], **kwargs: Any
    ) -> None:
        """Take away the mean and divide by `std`: each a number, or one an element of a vector."""
        super().__init__(**{"autocast": False, **kwargs})
        self.mean, self.std = np.array(mean, np.float64), np.array(std, np.float64)
        #: Whether it was called with numbers that are taken in float64.
        self.is_double = False

    def call(self, x: Any) -> tf.Tensor:
        """Return the numbers, of the shape that they had."""
        x = tf.convert_to_tensor(x)
        if x.dtype in (tf.int64, tf.int32, tf.uint32):
            left = self._whole(tf.cast(x, tf.int64))
        elif x.dtype in (tf.float64, tf.uint64):
            left = (tf.cast(x, tf.float64) - self.mean) / self.std
        else:
            left = (tf.cast(x, tf.float32) - self.mean.astype("f4")) / self.std.astype("f4")
        return tf.cast(left, self.compute_dtype)

    def _whole(self, x: tf.Tensor) -> tf.Tensor:
        limits = np.iinfo(np.int64)
        rounded = [int(each) for each in np.rint(self.mean).ravel().tolist()]
        centre, least, most = (
            np.array([min(max(each, limits.min), limits.max) for each in found], np.int64)
            .reshape(self.mean.shape)
            for found in (rounded, [e - _FAR for e in rounded], [e + _FAR for e in rounded])
        )  # fmt: skip
        near = tf.minimum(tf.maximum(x, least), most) - centre
        rest = (self.mean - centre.astype(np.float64)).astype("f4")
        return (tf.cast(near, tf.float32) - rest) / self.std.astype("f4")

    def compute_output_spec(self, x: Any) -> keras.KerasTensor:
        """Return the type and the shape of the numbers."""
        self.is_double = x.dtype in ("float64", "uint64")
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        return {**super().get_config(), "mean": self.mean.tolist(), "std": self.std.tolist()}
