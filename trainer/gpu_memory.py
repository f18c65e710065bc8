"""How much of its GPUs a task takes; and whether it sees those that it was given."""

from __future__ import annotations

import tensorflow as tf

from trainer.cluster import Task
from trainer.config import Config
from trainer.errors import UserError
from trainer.gpus import count_for


def settle(config: Config, task: Task) -> None:
    """Make TensorFlow take of the GPUs what the configuration says, before it touches one.

    Raises:
        UserError: the task sees fewer GPUs than it was given.
    """
    wanted = count_for(config, task)
    seen = tf.config.list_physical_devices("GPU")
    if len(seen) < wanted:
        raise UserError(
            f"{task} was given {wanted} GPUs (cluster.gpus_per_worker) and sees {len(seen)}: "
            "check the node's driver and the image's CUDA, or set it to 0 to train on the CPU"
        )
    for gpu in seen:
        if not config.cluster.gpu_memory_mb:
            tf.config.experimental.set_memory_growth(gpu, True)
            continue
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=config.cluster.gpu_memory_mb)
        tf.config.set_logical_device_configuration(gpu, [limit])
