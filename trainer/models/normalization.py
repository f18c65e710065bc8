"""A layer that normalizes numbers to mean 0 and variance 1, with constants in the graph.

A float32 has about 7 digits. Large numbers, such as Unix timestamps, differ only in their last
digits. A Keras layer loses these digits, because it casts its inputs to float32. This layer
subtracts the mean in a type that keeps all digits, and casts only the difference to float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

# Integers are clipped to this distance from the mean, so that the difference fits into int64. Real
# data are closer to the mean.
_FAR = 2**62


@keras.saving.register_keras_serializable(package="flotilla")
class Normalization(keras.layers.Layer):
    """Converts numbers of any type to normalized floats. NaN (a missing value) stays NaN."""

    def __init__(
        self, mean: float | Sequence[float], std: float | Sequence[float], **kwargs: Any
    ) -> None:
        """Store `mean` and `std`: each is one number, or a list of one number per element."""
        super().__init__(**{"autocast": False, **kwargs})
        self.mean, self.std = np.array(mean, np.float64), np.array(std, np.float64)
        #: Whether the layer was called with float64 or uint64 inputs.
        self.is_double = False

    def call(self, x: Any) -> Any:
        """Return the normalized numbers, in the shape of the input."""
        ops, dtype = keras.ops, keras.backend.standardize_dtype(x.dtype)
        if dtype in {"int64", "int32", "uint32"}:
            left = self._whole(ops.cast(x, "int64"))
        elif dtype in {"float64", "uint64"}:
            left = (ops.cast(x, "float64") - self.mean) / self.std
        else:
            left = (ops.cast(x, "float32") - self.mean.astype("f4")) / self.std.astype("f4")
        return ops.cast(left, self.compute_dtype)

    #: This method replaces the layer in Keras files, which must not need code of this package.
    plain = call

    def _whole(self, x: Any) -> Any:
        limits = np.iinfo(np.int64)
        rounded = [int(each) for each in np.rint(self.mean).ravel().tolist()]
        centre, least, most = (
            np.array([min(max(each, limits.min), limits.max) for each in found], np.int64)
            .reshape(self.mean.shape)
            for found in (rounded, [e - _FAR for e in rounded], [e + _FAR for e in rounded])
        )  # fmt: skip
        near = keras.ops.minimum(keras.ops.maximum(x, least), most) - centre
        rest = (self.mean - centre.astype(np.float64)).astype("f4")
        return (keras.ops.cast(near, "float32") - rest) / self.std.astype("f4")

    def compute_output_spec(self, x: Any) -> keras.KerasTensor:
        """Return the type and the shape of the normalized numbers."""
        self.is_double = x.dtype in ("float64", "uint64")
        return keras.KerasTensor(x.shape, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the layer, for saving."""
        return {**super().get_config(), "mean": self.mean.tolist(), "std": self.std.tolist()}
