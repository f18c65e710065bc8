"""The examples of one task, staged into its working folder before it joins the cluster."""

from __future__ import annotations

from trainer import storage
from trainer.cluster.launcher import Job
from trainer.config.data import DYNAMIC
from trainer.data.random_access import write_index
from trainer.data.read import fits_in_memory, stage_shards
from trainer.data.shards.shard_feed import ShardFeed
from trainer.data.shards.shard_store import (
    TRAIN,
    VALIDATION,
    Streaming,
    order_of,
    part_range,
    streaming_of,
)
from trainer.data.spec import DatasetSpec
from trainer.topology import Cluster, Task

# Graphs of the chief run in the process of a worker, and read the number of the worker from its
# working folder.
NUMBER_FILE = "number.txt"
SHARDS = "shards"
PATTERN = f"{SHARDS}/*.tfrecord"
VALIDATION_PATTERN = "validation/*.tfrecord"


def streaming_to(job: Job, cluster: Cluster) -> Streaming | None:
    """Return how shards come and go on the workers, if they do; raises `ConfigError`."""
    manifest = storage.read_manifest(job.dataset)
    return streaming_of(job.config, manifest, cluster.count("worker"))


def stage_input(job: Job, cluster: Cluster, task: Task) -> ShardFeed | None:
    """Fetch the shards that `task` trains on to `<workdir>/shards`; raises `UserError`.

    The validation split goes to `<workdir>/validation`. Where `data.disk` does not hold all that,
    nothing is fetched, and what is returned feeds the graphs of this process.
    """
    workers = cluster.count("worker")
    elsewhere = workers and not job.config.cluster.in_process
    if task.role == "ps" or (task.role == "chief" and elsewhere):
        return None
    (job.workdir / NUMBER_FILE).write_text(str(task.index), encoding="utf-8")
    # In one process all workers share one folder, and each reads all of it.
    disjoint = job.config.data.partition == "disjoint" and task.role == "worker"
    index, of = (task.index, workers) if disjoint else (0, 1)
    if streaming := streaming_to(job, cluster):
        return _feed(job, streaming, index, of, workers)
    paths = stage_shards(job.dataset, job.workdir / SHARDS, "train", index=index, of=of)
    spec = DatasetSpec.from_manifest(storage.read_manifest(job.dataset))
    if job.config.data.partition == DYNAMIC and not fits_in_memory(spec):
        write_index(paths)
    if spec.examples("validation"):
        stage_shards(job.dataset, job.workdir / "validation", "validation", index=0, of=1)
    return None


def _feed(job: Job, streaming: Streaming, index: int, of: int, workers: int) -> ShardFeed:
    spec = DatasetSpec.from_manifest(storage.read_manifest(job.dataset))
    mine = spec.files(TRAIN)[index::of]
    size = job.config.evaluation.batch_size

    def measured(_: int, part: int) -> list[str]:
        where = part_range(spec.shards[VALIDATION], size, part, max(1, workers))
        return spec.files(VALIDATION)[where.first : where.last]

    orders = {TRAIN: lambda seed, epoch: order_of(mine, seed, epoch), VALIDATION: measured}
    return ShardFeed(job.dataset, job.workdir, limit=streaming.limit, orders=orders)
