"""The interface of all launchers of a training cluster: a `Job` in, a published checkpoint out."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run.

    Attributes:
        config: the run configuration.
        dataset: URI of the published dataset.
        checkpoints: URI below which checkpoints are published; training resumes from the newest.
        workdir: a folder of this machine for working folders and logs of the tasks.
    """

    config: Config
    dataset: str
    checkpoints: str
    workdir: Path

    @property
    def run_id(self) -> str:
        """The id of the run: the folder that holds its checkpoints."""
        return run_of(self.checkpoints)


def run_of(checkpoints: str) -> str:
    """Return the id of the run that has its checkpoints below this URI."""
    path, _, _ = checkpoints.partition("?")
    return path.rstrip("/").rsplit("/", 2)[-2]


def task_command(job: Job, config: Path, workdir: Path) -> list[str]:
    """Return the command line of one task in the folder `workdir`; TF_CONFIG holds its role.

    `config` is the file with the job's configuration.
    """
    stage = [sys.executable, "-m", "trainer", "task", "--config", str(config)]
    uris = ["--dataset", job.dataset, "--checkpoints", job.checkpoints]
    return [*stage, *uris, "--workdir", str(workdir)]


class Launcher(Protocol):
    """Starts the tasks of a job, supervises them, and returns when training is done."""

    def __call__(self, job: Job) -> None:
        """Train to the end.

        When it returns, the final checkpoint is published and no task is left.

        Raises:
            UserError: the job failed for good; the message names the task and its error.
            RunInterruptedError: a stop was requested; the last checkpoint is published.
        """
