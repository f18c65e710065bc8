"""A worker in which TensorFlow finds two GPUs; what they are to compute, the processor does."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2 as upstream

from trainer.strategies.async_parameter_server import AsyncParameterServer


class TwoGpus(AsyncParameterServer):
    """Asynchronous training on workers with two GPUs."""

    def connect(self) -> None:
        """Connect, where each worker has GPUs next to its devices."""
        listed = tf.config.list_logical_devices
        worker = "/job:worker/replica:0/task:0"

        def with_gpus(kind: str | None = None) -> list[tf.config.LogicalDevice]:
            gpus = [tf.config.LogicalDevice(f"{worker}/device:GPU:{n}", "GPU") for n in range(2)]
            return [*listed(kind), *gpus]

        tf.config.list_logical_devices = with_gpus
        upstream.config.list_logical_devices = with_gpus
        super().connect()
        tf.config.list_logical_devices = upstream.config.list_logical_devices = listed
