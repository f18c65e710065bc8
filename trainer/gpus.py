"""Which GPUs a task is given, and how a local task is kept to its own. Free of TensorFlow."""

from __future__ import annotations

from glob import glob

from trainer.cluster import Task
from trainer.config import Config
from trainer.topology import topology_of


def count_for(config: Config, task: Task) -> int:
    """Return how many GPUs a task is given: workers compute, and a chief that has none."""
    topology = topology_of(config.training.strategy)
    computes = task.role == "worker" or (task.role == "chief" and not topology.workers)
    return config.cluster.gpus_per_worker if computes else 0


def environment(config: Config, task: Task) -> dict[str, str]:
    """Return the variables that let a local task see its own GPUs, by index, and no others.

    More workers than GPUs share them in turn; `cluster.gpu_memory_mb` then parts the memory.
    """
    count = count_for(config, task)
    present = len(glob("/dev/nvidia[0-9]*"))
    if not count or not present:
        return {"CUDA_VISIBLE_DEVICES": "-1"}
    first = task.index * count
    return {"CUDA_VISIBLE_DEVICES": ",".join(str((first + i) % present) for i in range(count))}
