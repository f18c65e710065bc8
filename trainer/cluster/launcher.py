"""A training run as a launcher sees it: the job, the command line of each task, and the end.

A launcher turns a `Job` into a published checkpoint. See `flotilla.trainer.cluster.local.launch`.
After the last publication, the leading task records the end of training. An exit code of 0 proves
nothing, because user code may end the process. The record is valid for this run and configuration,
and only while its checkpoint is the newest.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import to_tree
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import read_record

END_FILE = "end.json"
ALL_STEPS, EARLY_STOP = "all steps", "early stop"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training run. It resumes from the newest checkpoint below `checkpoints`."""

    config: Config
    dataset: str
    checkpoints: str
    workdir: Path

    @property
    def run_id(self) -> str:
        """The id of the run, which is the name of the folder above its checkpoints."""
        return find_run_id(self.checkpoints)


def find_run_id(checkpoints: str) -> str:
    """Return the id of the run with checkpoints below this URI."""
    path, _, _ = checkpoints.partition("?")
    return path.rstrip("/").rsplit("/", 2)[-2]


def task_command(job: Job, config: Path, workdir: Path) -> list[str]:
    """Return the command line of a task in `workdir`. The variable TF_CONFIG defines its role."""
    stage = [sys.executable, "-m", "flotilla.trainer", "task", "--config", str(config)]
    uris = ["--dataset", job.dataset, "--checkpoints", job.checkpoints]
    return [*stage, *uris, "--workdir", str(workdir)]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The record of how training ended.

    Attributes:
        steps: `training.steps`.
        reason: `ALL_STEPS` or `EARLY_STOP`.
        checkpoint: the name of the last checkpoint.
        created: the checkpoint's creation time, because a later one may have the same name.
    """

    run_id: str
    config_hash: str
    steps: int
    reason: str
    global_step: int
    checkpoint: str
    created: str


def record_end(job: Job, checkpoint: str) -> Completion:
    """Record that training ended with the checkpoint at this URI. Raises `UserError`."""
    manifest = storage.read_manifest(checkpoint)
    steps, reached = job.config.training.steps, int(manifest.fields["global_step"])
    over = Completion(
        run_id=job.run_id,
        config_hash=job.config.digest(),
        steps=steps,
        reason=ALL_STEPS if reached >= steps else EARLY_STOP,
        global_step=reached,
        checkpoint=storage.name_of(checkpoint),
        created=manifest.created,
    )
    storage.write_bytes(_place(job), json.dumps(to_tree(over), indent=2).encode())
    return over


def is_over(job: Job) -> bool:
    """Return whether training is over, according to the record and the newest checkpoint."""
    try:
        found = read_record(Completion, storage.read_bytes(_place(job)))
    except storage.Missing:
        return False
    if not found or (found.run_id, found.config_hash) != (job.run_id, job.config.digest()):
        return False
    # Compare creation times, because training may have skipped a corrupted later checkpoint.
    newest = max(
        storage.list_published(job.checkpoints),
        key=lambda pair: (pair[1].created, pair[0]),
        default=None,
    )
    named = storage.join(job.checkpoints, found.checkpoint)
    return newest is not None and (newest[0], newest[1].created) == (named, found.created)


def require_end(job: Job, task: str) -> None:
    """Raise `UserError` if `task` ended with exit code 0 but training is not over."""
    if not is_over(job):
        raise UserError(
            f"{task} ended with exit code 0 before training was complete: {job.checkpoints} has no "
            "record of the end of training; user code may have ended the process (os._exit)"
        )


def _place(job: Job) -> str:
    return storage.join(job.checkpoints, END_FILE)
