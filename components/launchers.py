"""The launchers of training clusters, by `cluster.launcher`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from components.image import DEFAULTS, PodDefaults
from trainer import events
from trainer.cluster import completion, local, task_logs
from trainer.cluster.launcher import Job
from trainer.config.cluster import Launcher
from trainer.config.load import parse_config, parse_value
from trainer.errors import ConfigError


def _local(job: Job, _defaults: PodDefaults) -> None:
    if os.environ.get(events.VARIABLE):
        # Who started the run follows the events of its tasks.
        local.launch(job)
        return
    with task_logs.relayed(job.workdir, _write):
        local.launch(job)


def _write(task: str, line: str) -> None:
    """Write a line of a task to the log of the step, in which the user looks for it."""
    sys.stdout.write(f"[{task}] {line}\n")
    sys.stdout.flush()


def _tfjob(job: Job, defaults: PodDefaults) -> None:
    # Importing the client of Kubernetes takes half a second, which a local run does not need.
    from components.kubernetes.launcher import launch
    from components.tfjob.manifest import leading

    launch(job, defaults)
    # Whatever the job and its pods say.
    completion.require(job, str(leading(job.config)))


LAUNCHERS: dict[Launcher, Callable[[Job, PodDefaults], None]] = {"local": _local, "tfjob": _tfjob}


def launch(job: Job, defaults: PodDefaults = DEFAULTS) -> None:
    """Train `job` with the launcher that its configuration names."""
    LAUNCHERS[job.config.cluster.launcher](job, defaults)


def end(launcher: str, kubernetes: str, run_id: str) -> None:
    """Delete what a run has left on a cluster; raises `UserError`.

    `launcher` and `kubernetes` are `cluster.launcher` and `cluster.kubernetes` as run parameters.
    """
    if launcher != "tfjob":
        return
    try:
        config = parse_config({"cluster": {"kubernetes": parse_value(kubernetes)}})
    except ConfigError:
        # The first step refused it, so that nothing was launched.
        return
    from components.kubernetes.launcher import delete_jobs

    delete_jobs(config.cluster.kubernetes, run_id)
