"""A launched job under test: its events as they arrive, its tasks, and its exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

import psutil
import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.history import read_history
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.events import Event, Progress

SECONDS = 300
Kind = TypeVar("Kind", bound=Event)


class Launched:
    """A launcher process.

    Events arrive through a pipe, so waiting for them requires no polling.
    """

    def __init__(
        self, process: subprocess.Popen[str], pipe: TextIO, folder: Path, checkpoints: str
    ) -> None:
        self.process = process
        self.folder = folder
        self.checkpoints = checkpoints
        self._pipe = pipe
        self.seen: list[Event] = []

    def wait_for(self, wanted: Callable[[Event], bool]) -> Event:
        """Read events until one matches; fail if the run ends first."""
        for event in filter(None, map(events.parse, self._pipe)):
            self.seen.append(event)
            if wanted(event):
                return event
        raise AssertionError(f"the run ended before; it said {self.process.communicate()}")

    def wait_for_step(self, step: int) -> Event:
        return self.wait_for(lambda e: isinstance(e, Progress) and e.global_step >= step)

    def end(self) -> tuple[int, str]:
        """Wait until the launcher ends; return its exit code and output."""
        self.seen += filter(None, map(events.parse, self._pipe))
        said, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, said

    def task(self, name: str) -> psutil.Process:
        return next(process for process in self.tasks() if _folder_of(process).name == name)

    def tasks(self) -> list[psutil.Process]:
        """Return the processes of all tasks, including those forked by a fork server."""
        place = self.folder / "cluster"
        return [each for each in psutil.process_iter() if _folder_of(each).parent == place]

    def kill(self, name: str) -> None:
        """Kill a task with SIGKILL, as the kernel's out-of-memory killer does."""
        self.task(name).send_signal(signal.SIGKILL)

    def events(self, kind: type[Kind]) -> list[Kind]:
        return [each for each in self.seen if isinstance(each, kind)]

    def newest(self) -> int:
        uri, step = newest_checkpoint(self.checkpoints)
        storage.verify(uri)
        return step

    def history(self) -> list[dict[str, Any]]:
        return read_history(self.checkpoints)


def _folder_of(process: psutil.Process) -> Path:
    """Return the folder with a task's configuration, or `.` if the process is not a task."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for word in process.cmdline():
            if word.endswith("/config.json"):
                return Path(word).parent
    return Path()


@contextmanager
def launched(
    config: dict[str, Any], dataset: str, folder: Path, checkpoints: str = ""
) -> Iterator[Launched]:
    """Start a launcher for a configuration; kill it if it is still running when the block ends."""
    folder.mkdir(exist_ok=True)
    job = folder / "job.json"
    checkpoints = checkpoints or storage.uri_of(folder / "checkpoints")
    workdir = str(folder / "cluster")
    job.write_text(
        json.dumps(
            {"config": config, "dataset": dataset, "checkpoints": checkpoints, "workdir": workdir}
        )
    )
    fifo = folder / "events"
    if not fifo.exists():
        os.mkfifo(fifo)
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.launch", str(job)],
            env={**os.environ, events.VARIABLE: str(fifo)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
        fifo.open(encoding="utf-8") as pipe,
    ):
        try:
            yield Launched(process, pipe, folder, checkpoints)
        finally:
            process.kill()


def run_to_end(
    config: dict[str, Any], dataset: str, folder: Path, checkpoints: str = ""
) -> Launched:
    """Launch a configuration, and return the launcher once it has ended with exit code 0."""
    with launched(config, dataset, folder, checkpoints) as run:
        code, said = run.end()
    assert code == 0, said
    return run


def some_of(names: Iterable[str], *quick: str) -> list[Any]:
    """Return parameters of a test, of which only those in `quick` are not long."""
    return [each if each in quick else pytest.param(each, marks=pytest.mark.long) for each in names]


def sections(
    steps: int, every: int, training: Mapping[str, Any] | None = None, **cluster: Any
) -> dict[str, Any]:
    """Return a configuration with two workers, a checkpoint each `every` steps, no validation."""
    own = {"steps": steps, "checkpoint_every": every, "validate_every": 0}
    sizes = {"parameter_servers": 1, "workers": 2}
    return {"training": {**own, **(training or {})}, "cluster": {**sizes, **cluster}}
