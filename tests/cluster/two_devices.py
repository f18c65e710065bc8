"""`single` on a machine with two accelerators, played by two devices of the processor."""

from __future__ import annotations

import tensorflow as tf

from trainer.strategies.mirrored import Replicated


class TwoDevices(Replicated):
    """Two replicas in one process, as on two GPUs."""

    def replicate(self) -> tf.distribute.Strategy:
        """Part the processor in two."""
        (processor,) = tf.config.list_physical_devices("CPU")
        part = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(processor, [part, part])
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
