"""Measures how much of its speed a job keeps while it repeatedly loses workers.

    python -m tests.chaos.goodput --launcher jobset --seconds 240 --every 60

Two runs of the same length train on a fake cluster, one after the other. The first is undisturbed;
in the second, workers are evicted in turn, with their grace period. The training operator then
fails the job, and the launcher recreates it; a JobSet loses only the pod. The goodput is the ratio
of the newest checkpoint steps of the second and the first run: repeated or unpublished steps do not
count. Without `--launcher`, both engines are measured.
"""

import argparse
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.events import Progress, Restart
from tests.chaos.followed import FLOTILLA, events_of, say
from tests.kubernetes.cluster import Cluster, real_cluster, shared

WORKERS = 2
LAUNCHERS = ("tfjob", "jobset")
SETTINGS = {
    "cluster.workers": WORKERS,
    "training.steps": 10**7,
    "training.checkpoint_every": 1000,
    "training.validate_every": 0,
}


@dataclass(kw_only=True)
class Course:
    """A run's newest step, and the seconds from each loss until the lost worker trains again."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    restarts: int = 0


class Lost:
    """The most recently lost worker, until its new pod trains."""

    def __init__(self) -> None:
        self._task = ""
        self._steps: float = math.inf

    def has_new_pod(self, task: str) -> None:
        self._steps, self._task = math.inf, task

    def is_back(self, progress: Progress) -> bool:
        """Return whether the lost worker trains again; True is returned only once per loss."""
        if not self._task:
            return False
        steps = progress.metrics["workers"].get(self._task, {}).get("local_steps", 0)
        is_back = bool(steps > self._steps)
        self._steps = steps
        if is_back:
            self._task = ""
        return is_back


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.goodput", description=__doc__)
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="default: both")
    parser.add_argument("--seconds", type=float, default=240, help="of training in each run")
    parser.add_argument("--every", type=float, default=60, help="seconds between two losses")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-goodput-"))
    for launcher in options.launcher or LAUNCHERS:
        measure(launcher, folder / launcher, options.seconds, options.every)
    return 0


def measure(launcher: str, folder: Path, seconds: float, every: float) -> None:
    quiet = train(launcher, folder / "quiet", seconds, math.inf)
    say(f"{launcher}, undisturbed: {quiet.step} steps in {seconds:g} s, {_load()}")
    lossy = train(launcher, folder / "losses", seconds, every)
    back = ", ".join(f"{each:.1f}" for each in lossy.returns)
    say(
        f"{launcher}, a worker lost every {every:g} s: {lossy.step} steps, {_load()}, "
        f"{len(lossy.losses)} losses, {lossy.restarts} restarts counted; seconds from a loss until "
        f"the worker took part again: {back}"
    )
    say(f"{launcher}, goodput: {lossy.step / quiet.step:.2f}")


def _load() -> str:
    return "load {:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg())


def train(launcher: str, folder: Path, seconds: float, every: float) -> Course:
    """Train for `seconds` after the first progress, and evict a worker every `every` seconds."""
    folder.mkdir(parents=True)
    with real_cluster(folder / "kubernetes") as kube:
        if launcher == "jobset":
            kube.install_jobset()
        environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}
        settings = {**SETTINGS, "cluster.launcher": launcher}
        options = [f"--set={name}={value}" for name, value in settings.items()]
        options.append(f"--set=storage.root={storage.uri_of(folder / 'store')}")
        options.append(f"--set={shared(folder)}")
        with (folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [*FLOTILLA, "train", "--workdir", str(folder / "runs"), *options],
                env=environment,
                stdout=output,
                stderr=output,
            )
        course = _followed(process, kube, folder / "runs", seconds, every)
        process.wait()
        kube.wait_until_deleted()
    (config,) = (folder / "runs").glob("*/config.json")
    root = storage.uri_of(folder / "store")
    course.step = newest_checkpoint(storage.join(root, config.parent.name, "checkpoints"))[1]
    return course


def _followed(
    process: subprocess.Popen[bytes], kube: Cluster, workdir: Path, seconds: float, every: float
) -> Course:
    course, over = Course(), threading.Event()
    clock: threading.Thread | None = None
    lost = Lost()

    def tick() -> None:
        began = time.monotonic()
        for number in itertools.count(1):
            at = number * every
            if over.wait(min(at, seconds) - (time.monotonic() - began)) or at >= seconds:
                break
            task = f"worker-{number % WORKERS}"
            course.losses.append(time.monotonic())
            pod = kube.take_away(task, "EvictionByEvictionAPI")
            kube.pod(task, but=pod["metadata"]["uid"])
            lost.has_new_pod(task)
        process.send_signal(signal.SIGTERM)

    for event in events_of(process, workdir, {}):
        if isinstance(event, Progress) and clock is None:
            clock = threading.Thread(target=tick, daemon=True)
            clock.start()
        course.restarts += isinstance(event, Restart)
        if isinstance(event, Progress) and lost.is_back(event):
            course.returns.append(time.monotonic() - course.losses[-1])
    over.set()
    assert clock, f"training has not begun; see {workdir.parent}"
    clock.join()
    return course


if __name__ == "__main__":
    sys.exit(main())
