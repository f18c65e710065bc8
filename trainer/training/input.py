"""The training examples of one task, brought into its working folder before it joins."""

from __future__ import annotations

from trainer import storage
from trainer.cluster.launcher import Job
from trainer.data.read import DatasetSpec, stage_shards
from trainer.topology import Cluster, Task

# Graphs that the chief made run in a worker's process: what they need to know of the worker they
# read from its working folder.
NUMBER_FILE = "number.txt"
PATTERN = "shards/*.tfrecord"
VALIDATION_PATTERN = "validation/*.tfrecord"


def stage_input(job: Job, cluster: Cluster, task: Task) -> None:
    """Fetch the shards that `task` trains on to `<workdir>/shards`; raises `UserError`.

    All of the validation split comes to `<workdir>/validation`: any part of it may fall to any
    worker. A chief that has workers trains on nothing itself, a parameter server never does.
    """
    workers = cluster.count("worker")
    elsewhere = workers and not job.config.cluster.in_process
    if task.role == "ps" or (task.role == "chief" and elsewhere):
        return
    (job.workdir / NUMBER_FILE).write_text(str(task.index), encoding="utf-8")
    # In one process all workers have one folder, and each of them reads all of it.
    disjoint = job.config.data.partition == "disjoint" and task.role == "worker"
    index, of = (task.index, workers) if disjoint else (0, 1)
    stage_shards(job.dataset, job.workdir / "shards", "train", index=index, of=of)
    if DatasetSpec.from_manifest(storage.read_manifest(job.dataset)).examples("validation"):
        stage_shards(job.dataset, job.workdir / "validation", "validation", index=0, of=1)
