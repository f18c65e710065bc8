"""Strategies under test on separate servers, without a launcher and without a dataset.

    with serving(tmp_path, ps=1, workers=2) as servers:
        outcome = servers.lead(Trial(config, "tests.cluster.problems:equal", runs=[20]))

Every task is a process with its own folder. A process can join only one TensorFlow cluster, so a
separate process leads the strategy (`tests.cluster.lead`) and reports the results. The same servers
can serve any number of leading processes, one after the other.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.forks import Request
from flotilla.trainer.cluster.local import reserve_cluster
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime import signals

Words = dict[str, Any]
CHIEF = Task(role="chief", index=0)
# Environment variable with the file descriptor to which the leading process writes its results.
WORDS = "WORDS"


@dataclass(frozen=True)
class Trial:
    """Instructions for a leading process.

    Attributes:
        config: the sections of a configuration that differ from the defaults.
        problem: `module:function` that returns a `Problem`, called with `arguments`.
        runs: number of steps of each call of `run`.
        start: values of variables by path, set before the first run.
    """

    config: Mapping[str, Any]
    problem: str
    runs: Sequence[int]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    measured: bool = False


@dataclass(frozen=True)
class Outcome:
    """The output of a leading process: a report per run, and the final values of all variables."""

    reports: list[Words]
    variables: Mapping[str, Any]
    devices: Mapping[str, str]
    global_step: int
    learning_rate: float
    totals: list[float]


class Leading:
    """A process that leads a strategy; its output can be read as it arrives."""

    def __init__(self, process: forks.Process, words: TextIO, log: Path) -> None:
        self.process = process
        self._words = words
        self._log = log
        self.said: list[Words] = []

    def next(self) -> Words:
        """Wait for the next message of the process: the report of a run, or the final result."""
        line = self._words.readline()
        assert line, f"{self._log}: {self._log.read_text(encoding='utf-8')[-3000:]}"
        self.said.append(json.loads(line))
        return self.said[-1]

    def outcome(self) -> Outcome:
        while not self.said or "variables" not in self.said[-1]:
            self.next()
        self.end()
        return Outcome(reports=self.said[:-1], **self.said[-1])

    def end(self) -> None:
        code = self.process.wait()
        assert code == 0, f"{self._log}: {self._log.read_text(encoding='utf-8')[-3000:]}"


@dataclass
class Servers:
    """The tasks of a cluster, each in the folder `folder/<role>-<index>`."""

    cluster: Cluster
    folder: Path
    devices: int = 1
    processes: dict[str, forks.Process] = field(default_factory=dict)
    pipes: list[TextIO] = field(default_factory=list)

    def start(self, task: Task) -> None:
        settings = {"TF_USE_LEGACY_KERAS": "1", "DEVICES": str(self.devices)}
        self.processes[str(task)] = self._process(task, ["tests.cluster.server"], settings)

    def kill(self, task: Task) -> None:
        """Kill a task with SIGKILL, as the kernel's out-of-memory killer does."""
        _end(self.processes.pop(str(task)))

    def lead(self, trial: Trial) -> Outcome:
        return self.start_lead(trial).outcome()

    def start_lead(self, trial: Trial, task: Task = CHIEF) -> Leading:
        """Start a leading process; without a chief, call this once for each worker's task."""
        return self.start_module("tests.cluster.lead", asdict(trial), task)

    def start_module(self, module: str, spec: Words, task: Task = CHIEF) -> Leading:
        """Start a leading process with another module, which reads `spec` from a file."""
        folder = self.folder / str(task)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        if str(task) in self.processes:
            self.kill(task)
        reader, writer = os.pipe()
        writer = forks.high(writer)
        self.pipes.append(os.fdopen(reader, encoding="utf-8"))
        with os.fdopen(writer, "wb"):
            process = self._process(task, [module, str(path)], {WORDS: str(writer)}, (writer,))
        self.processes[str(task)] = process
        return Leading(process, self.pipes[-1], folder / "log.txt")

    def _process(
        self, task: Task, module: list[str], own: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> forks.Process:
        folder = self.folder / str(task)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "number.txt").write_text(str(task.index), encoding="utf-8")
        settings = {
            **os.environ,
            **signals.parent_environment(),
            "GRPC_FAIL_FAST": "use_caller",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **own,
        }
        if self.cluster.addresses:
            settings["TF_CONFIG"] = self.cluster.tf_config(task)
        wanted = Request(
            command=[sys.executable, "-m", *module],
            loaded=MODULES["chief" if descriptors else "server"],
            folder=str(folder),
            environment=settings,
            descriptors=descriptors,
        )
        with (folder / "log.txt").open("ab") as log:
            return forks.start_process(wanted, log.fileno())

    def end(self) -> None:
        for process in self.processes.values():
            _end(process)
        for pipe in self.pipes:
            pipe.close()


def _end(process: forks.Process) -> None:
    process.kill()
    process.wait()


@contextmanager
def serving(
    folder: Path, *, ps: int = 0, workers: int = 0, chief: bool = True, devices: int = 1
) -> Iterator[Servers]:
    """Start parameter servers and workers, and end all tasks when the block ends.

    Without a chief, each worker must be started with `start_lead(trial, task)`. Without servers and
    workers, there is only the leading process.
    """
    roles = {"ps": ps, "worker": workers, "chief": int(chief and ps + workers > 0)}
    with reserve_cluster({role: count for role, count in roles.items() if count}) as cluster:
        servers = Servers(cluster, folder, devices)
        try:
            for role in ("ps", "worker") if chief else ("ps",):
                for index in range(roles[role]):
                    servers.start(Task(role=role, index=index))
            yield servers
        finally:
            servers.end()
