"""Starts tasks one by one, as containers and published examples do."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime import signals

PS, CHIEF = (Task(role=role, index=0) for role in ("ps", "chief"))
# Maximum run time of a cluster, in seconds; long enough for a busy machine.
SECONDS = 600


@dataclass
class ByHand:
    """Tasks of one cluster: each is `python -m flotilla.trainer task` in its own folder."""

    folder: Path
    dataset: str
    cluster: Cluster
    config: dict[str, object]
    processes: dict[Task, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def checkpoints(self) -> str:
        return storage.uri_of(self.folder / "checkpoints")

    def log(self, task: Task) -> str:
        return (self.folder / f"{task}.log").read_text(encoding="utf-8")

    def start(self, task: Task, flags: tuple[str, ...] = (), module: str = "trainer") -> None:
        """Start a task that reads its cluster from TF_CONFIG or from flags."""
        config = self.folder / "config.json"
        config.write_text(parse_config(self.config).model_dump_json(), encoding="utf-8")
        settings = {**os.environ, **signals.parent_environment(), "GRPC_FAIL_FAST": "use_caller"}
        if not flags:
            settings["TF_CONFIG"] = self.cluster.tf_config(task)
        stage = ["--config", str(config), "--workdir", str(self.folder / str(task))]
        uris = ["--dataset", self.dataset, "--checkpoints", self.checkpoints]
        with (self.folder / f"{task}.log").open("wb") as log:
            self.processes[task] = subprocess.Popen(
                [sys.executable, "-m", module, "task", *stage, *uris, *flags],
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, task: Task, text: str) -> None:
        """Wait until a task's output contains a text; fail if the task ends first."""
        while text not in self.log(task):
            assert self.processes[task].poll() is None, self.log(task)
            time.sleep(0.1)

    def flags(self, task: Task) -> tuple[str, ...]:
        """Return the flags that are equivalent to TF_CONFIG."""
        hosts = [
            f"--{role}_hosts={','.join(each)}" for role, each in self.cluster.addresses.items()
        ]
        return (*hosts, "--job_name", task.role, "--task_index", str(task.index))

    def end_of(self, task: Task) -> int:
        return self.processes[task].wait(timeout=SECONDS)


@contextmanager
def by_hand(
    folder: Path, dataset: str, cluster: Cluster, config: dict[str, object]
) -> Iterator[ByHand]:
    """Yield an object that starts tasks; when the block ends, end all of them."""
    tasks = ByHand(folder, dataset, cluster, config)
    try:
        yield tasks
    finally:
        for process in tasks.processes.values():
            process.kill()
            process.wait()
