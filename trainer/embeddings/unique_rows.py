"""The unique rows of a batch, and copies of them at all their positions in the batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


@tf.custom_gradient
def spread(rows: tf.Tensor, places: tf.Tensor) -> Any:
    """Return `rows[places]`. The gradient of a row is the sum over all of its positions."""

    def gradient(given: tf.Tensor) -> tuple[tf.Tensor, None]:
        return tf.math.unsorted_segment_sum(given, places, tf.shape(rows)[0]), None

    return tf.gather(rows, places), gradient
