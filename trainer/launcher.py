"""What every launcher of a training cluster takes and gives: `local` and `tfjob` alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.config import Config


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run to be launched.

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


class Launcher(Protocol):
    """Starts the tasks of a job, watches them, and returns when training is done."""

    def __call__(self, job: Job) -> None:
        """Train to the end.

        When it returns, the final checkpoint is published and no task is left.

        Raises:
            UserError: the job failed for good; the message names the task and what it said.
            RunInterruptedError: an end was asked for; the last checkpoint is published.
        """
