"""Which launcher trains a job: `cluster.launcher` names it."""

from __future__ import annotations

from trainer import local_cluster
from trainer.launcher import Job, Launcher

LAUNCHERS: dict[str, Launcher] = {"local": local_cluster.launch}


def launch(job: Job) -> None:
    """Train `job` with the launcher that its configuration names."""
    LAUNCHERS[job.config.cluster.launcher](job)
