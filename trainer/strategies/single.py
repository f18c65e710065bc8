"""One process without a cluster; mirrored over its GPUs when there are several.

The plainest strategy: what every other one is measured and checked against.
"""

from __future__ import annotations

import tensorflow as tf

from trainer.strategies.replicated import Replicated


class Single(Replicated):
    """Model, input and updates in this process."""

    def replicate(self) -> tf.distribute.Strategy:
        """Return a strategy over the GPUs, or TensorFlow's default of one device."""
        gpus = tf.config.list_logical_devices("GPU")
        return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()
