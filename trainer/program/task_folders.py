"""The folders, the environment and the command of a program's task."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.program import fill, task_values
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.errors import report_errors

# Variables that only Flotilla's own processes use. A guard does not inherit them.
_OWN = ("PYTHONSAFEPATH",)
_PREFIX = "FLOTILLA_"


class TaskFolders:
    """The folders of one task.

    The program writes to `checkpoints`, `model`, `logs` and `metrics`.
    """

    def __init__(self, *, folder: Path) -> None:
        """Store the folder of the task, without creating anything."""
        self.folder = folder
        names = ("dataset", "checkpoints", "model", "logs", "exchange")
        self._made = [folder / name for name in names]
        self.dataset, self.checkpoints, self.model, self.logs, self.exchange = self._made
        self.metrics = folder / "metrics.jsonl"

    def make(self) -> None:
        """Create the folders. Raises `UserError`."""
        with report_errors(f"create the folders of the program in {self.folder}"):
            for each in self._made:
                each.mkdir(parents=True, exist_ok=True)


def make_start(job: Job, cluster: Cluster, task: Task, attempt: int) -> dict[str, Any]:
    """Return the fields of the `start` message for the guard. Raises `ConfigError`."""
    program, folders = job.config.program, TaskFolders(folder=job.workdir)
    values = _values(job, cluster, task, folders)
    try:
        command = [fill(word, values) for word in program.command]
        own = {name: fill(value, values) for name, value in program.env.items()}
    except ValueError as error:
        raise ConfigError(f"program: {error}") from None
    given = {
        "TF_CONFIG": cluster.tf_config(task),
        "FLOTILLA_RUN_ID": job.run_id,
        "FLOTILLA_DATASET": job.dataset,
        "FLOTILLA_DATASET_FILES": values["dataset_files"],
        "FLOTILLA_CHECKPOINTS": str(folders.checkpoints),
        "FLOTILLA_MODEL": str(folders.model),
        "FLOTILLA_LOGS": str(folders.logs),
        "FLOTILLA_METRICS": str(folders.metrics),
        # Disable buffering, because printed steps must arrive without delay.
        "PYTHONUNBUFFERED": "1",
    }
    return {"attempt": attempt, "command": command, "env": {**given, **own}}


def guard_environment(path: str) -> dict[str, str]:
    """Return the environment of a guard on this machine, with `path` first in `PATH`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIX) and name not in _OWN
    }
    return {**inherited, "PATH": os.pathsep.join(filter(None, (path, os.environ.get("PATH"))))}


def _values(job: Job, cluster: Cluster, task: Task, folders: TaskFolders) -> Mapping[str, str]:
    config = job.config
    has_files = config.program.data == "files" and task.role != "ps"
    return {
        **task_values(config.training, task.role, str(task.index), cluster.addresses),
        "gpu": str(task.index % _count_gpus(config, task.role)),
        "dataset": job.dataset,
        "dataset_files": str(folders.dataset) if has_files else "",
        "checkpoints": str(folders.checkpoints),
        "model": str(folders.model),
        "logs": str(folders.logs),
        "metrics": str(folders.metrics),
    }


def _count_gpus(config: Config, role: str) -> int:
    """Return the number of GPUs of a task, at least 1, by its pod's limits or the configuration."""
    cluster = config.cluster
    pod = cluster.kubernetes.of(role).resources.limits if cluster.launcher != "local" else {}
    return max(1, int(pod.get(cluster.kubernetes.gpu_resource, cluster.gpus_per_worker)))
