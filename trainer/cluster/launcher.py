"""A training run as a launcher sees it: the job, and the command line of each task.

A launcher turns a `Job` into a published checkpoint. See `flotilla.trainer.cluster.local.launch`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from flotilla.trainer.config.schema import Config


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
