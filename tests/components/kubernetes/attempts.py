"""Helpers that run one attempt of `train_model` on Kubernetes, in a thread or in a process."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flotilla.components import launchers
from flotilla.components.kubernetes import launcher as kubernetes_launcher
from flotilla.components.kubernetes.jobset import JobSets
from flotilla.components.kubernetes.tfjob import TFJobs
from flotilla.trainer import events
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import UserError
from tests.kubernetes.cluster import Cluster

EACH_ENGINE = pytest.mark.parametrize("engine", [TFJobs(), JobSets()], ids=lambda each: each.name)
SECONDS = 180
# Exit code and message of a launcher that was interrupted twice.
TWICE = (130, "interrupted twice; the last published checkpoint is intact")
ROOT = Path(__file__).parents[3]
# A launcher in its own process. It imports no test module, because importing the fake cluster would
# double its start time.
LAUNCH = """
import json, sys
from pathlib import Path
from flotilla.components.launchers import launch
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.runtime.errors import UserError
config, given = json.loads(sys.argv[1])
try:
    launch(Job(config=parse_config(config), workdir=Path(), **given))
except UserError as error:
    sys.stderr.write(f"{error}\\n"); sys.exit(error.exit_code)
"""


def job_of(tree: dict[str, Any], *uris: str, **named: str) -> Job:
    config, given = _described(tree, *uris, **named)
    return Job(config=parse_config(config), workdir=Path(), **given)


def _described(
    tree: dict[str, Any], root: str = "gs://b/run-1", dataset: str = "gs://b/d"
) -> tuple[dict[str, Any], dict[str, str]]:
    config = {**tree, "cluster": {"launcher": "tfjob", **tree.get("cluster", {})}}
    return config, {"dataset": dataset, "checkpoints": f"{root}/checkpoints"}


def settings(max_restarts: int = 3, **deadlines: int) -> dict[str, Any]:
    """Return a configuration with one task per role and the given deadlines in seconds."""
    kubernetes = {"deadlines": deadlines}
    return {"cluster": {"workers": 1, "max_restarts": max_restarts, "kubernetes": kubernetes}}


class Attempt(threading.Thread):
    """A call of `launch` in a thread, where it cannot receive signals."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True)
        self._job = job
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            engine = launchers.engine(self._job.config.cluster.launcher)
            kubernetes_launcher.launch(engine, self._job)
        except BaseException as error:
            self.error = error

    def succeed(self) -> None:
        self.join(SECONDS)
        assert not self.is_alive(), "the launcher has not ended"
        if self.error:
            raise self.error

    def failure(self) -> str:
        """Wait for a launcher that must fail; return its one-line error."""
        self.join(SECONDS)
        assert not self.is_alive(), "the launcher has not ended"
        assert isinstance(self.error, UserError), repr(self.error)
        assert "\n" not in str(self.error)
        return str(self.error)


def watching_attempt(kube: Cluster, **deadlines: int) -> Attempt:
    attempt = Attempt(job_of(settings(**deadlines)))
    kube.wait_watched()
    return attempt


def running_attempt(kube: Cluster, **deadlines: int) -> Attempt:
    attempt = watching_attempt(kube, **deadlines)
    kube.run_all()
    return attempt


def complete(kube: Cluster, attempt: Attempt) -> None:
    """End the chief of a job with 0; the launcher then deletes the job, and succeeds."""
    kube.finish("chief-0", 0)
    attempt.succeed()
    kube.wait_until_deleted()


def run_to_end(kube: Cluster, attempt: Attempt) -> None:
    kube.run_all()
    complete(kube, attempt)


def wait_read(task: str) -> None:
    for thread in threading.enumerate():
        if thread.name == f"log {task}":
            thread.join(SECONDS)
            assert not thread.is_alive(), f"the log of {task} is still read"


@contextmanager
def heard(kind: type[events.Event]) -> Iterator[None]:
    """Wait at the end of the block until a launcher in this process has emitted a `kind` event."""
    seen = threading.Event()

    def take(event: events.Event) -> None:
        if isinstance(event, kind):
            seen.set()

    with events.listen(take):
        yield
        assert seen.wait(SECONDS), f"no {kind.__name__}"


class Step:
    """A call of `launch` in a separate process, as a pipeline step makes it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=2 * SECONDS)
        return self.process.returncode, out, (err.strip().splitlines() or [""])[-1]


def without_beats(requests: list[str]) -> Iterator[str]:
    """Omit heartbeat requests, because a separate thread sends them at unpredictable times."""
    return (request for request in requests if "/leases/" not in request)


@contextmanager
def step(kube: Cluster, tree: dict[str, Any], **job: str) -> Iterator[Step]:
    """Start an attempt as a process, and kill it at the end of the block."""
    environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, json.dumps(_described(tree, **job))],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Step(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def running_step(kube: Cluster, tree: dict[str, Any] | None = None, *kinds: str) -> Iterator[Step]:
    """Start an attempt as a process that watches `kinds` of objects, and run its pods."""
    with step(kube, tree or settings()) as process:
        kube.wait_watched(*kinds)
        kube.run_all()
        yield process
