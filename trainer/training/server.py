"""The task of a worker or parameter server, which serves TensorFlow's runtime to the chief.

This module does not import Keras, because a server only runs graphs and Keras loads slowly.
"""

from __future__ import annotations

import os
from itertools import zip_longest
from pathlib import Path

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.part_server import PartServer
from flotilla.trainer.cluster import loopback
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.process import gpu_count, list_gpu_limits
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.data.blocks import write_index
from flotilla.trainer.data.read import fits_in_memory, stage_shards
from flotilla.trainer.data.shard_feed import (
    TRAIN,
    VALIDATION,
    ShardFeed,
    Streaming,
    part_range,
    plan_streaming,
    shuffle_shards,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import ConfigError

# Number of inter-op threads for all servers in one process. With fewer threads, servers that wait
# for each other would hang.
IN_PROCESS_THREADS = 16
_SERVERS: list[tf.distribute.Server] = []


def configure_gpus(config: Config, task: Task) -> None:
    """Limit the GPU memory of this process, before its first use. Raises `ConfigError`."""
    wanted = gpu_count(config, task)
    seen = tf.config.list_physical_devices("GPU")
    if len(seen) < wanted:
        raise ConfigError(
            f"{task} was assigned {wanted} GPUs (cluster.gpus_per_worker) but finds {len(seen)}: "
            "check the node's driver and the image's CUDA, or set the key to 0 to train on the CPU"
        )
    for gpu, limit in zip_longest(seen, list_gpu_limits(config.cluster, len(seen))):
        if not limit:
            tf.config.experimental.set_memory_growth(gpu, True)
            continue
        part = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
        tf.config.set_logical_device_configuration(gpu, [part])


def serve(job: Job, cluster: Cluster, task: Task) -> None:
    """Stage the shards of a worker, and serve on the address of the task. Never returns.

    The chief's input pipelines run here, and read the shards of this worker from
    `shards/*.tfrecord`. Raises `UserError` if shards cannot be fetched, now or later.
    """
    configure_gpus(job.config, task)
    feed = stage_input(job, cluster, task)
    loopback.close_to_others(cluster.address(task))
    # Start the part server before TensorFlow's server, because `start` clears the folder that the
    # chief's graphs use.
    if task.role == "ps" and not PartServer(Path(), str(task)).start():
        # Leave the folder: it may contain the ready file of an earlier process, and the chief
        # would wait for replies of that process.
        os.chdir("/")
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec()),
        job_name=task.role,
        task_index=task.index,
        config=server_settings(job.config),
    )
    if feed:
        feed.wait()
    server.join()


def serve_in_process(config: Config, cluster: Cluster) -> None:
    """Start every parameter server and worker in this process, in one working directory."""
    settings = server_settings(config)
    settings.inter_op_parallelism_threads = IN_PROCESS_THREADS
    for role in ("ps", "worker"):
        for index, address in enumerate(cluster.addresses[role]):
            loopback.close_to_others(address)
            spec = tf.train.ClusterSpec(cluster.spec())
            server = tf.distribute.Server(spec, job_name=role, task_index=index, config=settings)
            _SERVERS.append(server)


def server_settings(config: Config) -> tf.compat.v1.ConfigProto:
    """Return the settings of a server: its GPU memory, and threads that sleep while they wait.

    By default, threads spin before they sleep, and a server takes all memory of its GPUs.
    """
    settings = tf.compat.v1.ConfigProto()
    settings.experimental.disable_thread_spinning = True
    limits = list_gpu_limits(config.cluster, len(tf.config.list_physical_devices("GPU")))
    settings.gpu_options.allow_growth = not limits
    for limit in limits:
        settings.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[limit])
    return settings


# The chief's graphs run in the worker's process, and read the worker's number from this file in its
# working directory.
NUMBER_FILE = "number.txt"
SHARDS = "shards"
PATTERN = f"{SHARDS}/*.tfrecord"
VALIDATION_PATTERN = "validation/*.tfrecord"


def find_streaming(job: Job, cluster: Cluster) -> Streaming | None:
    """Return how to stream shards to workers, or None to stage all. Raises `ConfigError`."""
    manifest = storage.read_manifest(job.dataset)
    return plan_streaming(job.config, manifest, cluster.count("worker"))


def stage_input(job: Job, cluster: Cluster, task: Task) -> ShardFeed | None:
    """Fetch the shards that `task` trains on to `<workdir>/shards`. Raises `UserError`.

    The validation split goes to `<workdir>/validation`. If `data.disk` is too small for both,
    nothing is fetched, and the returned feed streams shards to the graphs of this process.
    """
    workers = cluster.count("worker")
    elsewhere = workers and not job.config.cluster.in_process
    if task.role == "ps" or (task.role == "chief" and elsewhere):
        return None
    (job.workdir / NUMBER_FILE).write_text(str(task.index), encoding="utf-8")
    # In one process, all workers share a folder, and each one reads all shards.
    disjoint = job.config.data.partition == "disjoint" and task.role == "worker"
    index, of = (task.index, workers) if disjoint else (0, 1)
    spec = DatasetSpec.from_manifest(storage.read_manifest(job.dataset))
    if streaming := find_streaming(job, cluster):
        return _feed(job, spec, streaming, spec.files(TRAIN)[index::of], workers)
    paths = stage_shards(job.dataset, job.workdir / SHARDS, "train", index=index, of=of)
    if not fits_in_memory(spec):
        write_index(paths)
    if spec.examples("validation"):
        stage_shards(job.dataset, job.workdir / "validation", "validation", index=0, of=1)
    return None


def _feed(
    job: Job, spec: DatasetSpec, streaming: Streaming, mine: list[str], workers: int
) -> ShardFeed:
    size = job.config.evaluation.batch_size

    def order_parts(_: int, part: int) -> list[str]:
        where = part_range(spec.shards[VALIDATION], size, part, max(1, workers))
        return spec.files(VALIDATION)[where.first : where.last]

    orders = {TRAIN: lambda seed, epoch: shuffle_shards(mine, seed, epoch), VALIDATION: order_parts}
    return ShardFeed(job.dataset, job.workdir, limit=streaming.limit, orders=orders)
