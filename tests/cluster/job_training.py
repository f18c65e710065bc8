"""Runs training as a Kubernetes job whose pods are local processes, for tests of both engines."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.events import Event, Progress
from tests.components.kubernetes.attempts import Step, step
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.store import Tree
from tests.pipelines.called import processes_of

EngineName = Literal["tfjob", "jobset"]
Kind = TypeVar("Kind", bound=Event)
SECONDS_TO_END = 120


def on_engines(
    tfjob: pytest.MarkDecorator | None = None, jobset: pytest.MarkDecorator | None = None
) -> pytest.MarkDecorator:
    """Return a mark that runs a test on both engines; each engine may have an additional mark."""
    marks = {"tfjob": tfjob, "jobset": jobset}
    return pytest.mark.parametrize(
        "engine", [pytest.param(name, marks=[mark] if mark else []) for name, mark in marks.items()]
    )


class Training:
    """A run with its settings, launcher process, events and checkpoints."""

    def __init__(self, kube: Cluster, engine: str, folder: Path, dataset: str) -> None:
        self.kube, self.engine = kube, engine
        self.root = storage.uri_of(folder / "run-1")
        self._folder, self._dataset = folder, dataset
        self.lines: list[str] = []
        self.step: Step

    @contextmanager
    def begun(
        self, steps: int, every: int = 200, training: Tree | None = None, **cluster: Any
    ) -> Iterator[Training]:
        """Start the launcher, and kill it when the block ends."""
        trained = {"steps": steps, "checkpoint_every": every, "validate_every": 0}
        sized = {"workers": 2, "max_restarts": 9, "communication": "ring"}
        tree = {
            "training": {**trained, **(training or {})},
            "cluster": {**sized, "launcher": self.engine, **cluster},
        }
        with step(self.kube, tree, root=self.root, dataset=self._dataset) as self.step:
            yield self

    def wait_for_line(self, text: str) -> str:
        assert self.step.process.stdout
        for line in self.step.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"no line with {text!r}: {self.step.end()}")

    def wait(self, kind: type[Kind], accept: Callable[[Kind], bool] = lambda _: True) -> Kind:
        while True:
            found = events.parse(self.wait_for_line(events.MARK))
            if isinstance(found, kind) and accept(found):
                return found

    def end(self) -> tuple[int, str]:
        """Wait for the launcher to end; return its exit code and last line."""
        code, out, message = self.step.end()
        self.lines += out.splitlines(keepends=True)
        return code, message

    def kill_launcher(self) -> None:
        """Kill the launcher, as KFP or a node failure would."""
        self.step.signal(signal.SIGKILL)
        self.end()

    def published(self) -> int:
        """Verify the newest checkpoint, and return its global step."""
        uri, reached = newest_checkpoint(storage.join(self.root, "checkpoints"))
        storage.verify(uri)
        return reached

    def said(self, kind: type[Kind]) -> list[Kind]:
        return [
            each for each in events.read(self._folder / "events.jsonl") if isinstance(each, kind)
        ]

    def job(self) -> Tree:
        return self.kube.job() if self.engine == "tfjob" else self.kube.jobset()

    def uids(self) -> dict[str, str]:
        return {task: pod["metadata"]["uid"] for task, pod in self.kube.pods().items()}

    def lose(self, task: str) -> None:
        """Kill a task's container, and wait for its new pod."""
        pod = self.kube.kill(task)
        self.kube.pod(task, but=pod["metadata"]["uid"])

    def lose_a_worker(self) -> None:
        lost = "worker-1"
        # Steps that the worker did before it was killed may be counted late, so wait for several
        # increases.
        last = [_steps_of(self.wait(Progress), lost)]
        self.lose(lost)

        def goes_on(progress: Progress) -> bool:
            last.append(_steps_of(progress, lost))
            return len(last) > 3 and last[-4] < last[-3] < last[-2] < last[-1]

        self.wait(Progress, goes_on)

    def require_nothing_left(self) -> None:
        self.kube.store.wait(lambda: not self.kube.of_jobs())
        # A forced deletion removes a pod before its processes have ended.
        _, alive = psutil.wait_procs(processes_of(self._folder), timeout=SECONDS_TO_END)
        assert not alive


def _steps_of(progress: Progress, worker: str) -> int:
    return int(progress.metrics["workers"].get(worker, {}).get("local_steps", 0))
