"""How much of its speed a TFJob keeps that loses a worker again and again.

    python -m tests.chaos.goodput --seconds 240 --every 60

Two runs of the same length on the stand-in of a cluster, one after the other: an undisturbed one,
and one whose workers are evicted in turn, with their grace period. The operator fails the job each
time, and the launcher makes it again. The goodput is the step of the newest checkpoint of the
second over that of the first: what is trained twice, or is not published, does not count.
"""

from __future__ import annotations

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

from tests.chaos.run import FLOTILLA, events_of
from tests.kubernetes.cluster import Cluster, real_cluster
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.events import AttemptBegin, Progress, Restart

WORKERS = 2
SETTINGS = {
    "cluster.launcher": "tfjob",
    "cluster.workers": WORKERS,
    "training.steps": 10**7,
    "training.checkpoint_every": 1000,
    "training.validate_every": 0,
}


@dataclass(kw_only=True)
class Course:
    """What came of a run.

    Attributes:
        step: of its newest checkpoint.
        losses: the times at which a pod was taken away.
        returns: the seconds from each loss to the next progress.
        restarts: how many the run has counted.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    restarts: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Print both runs and the goodput."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.goodput", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="of training in each run")
    parser.add_argument("--every", type=float, default=60, help="seconds between two losses")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-goodput-"))
    quiet = train(folder / "quiet", options.seconds, math.inf)
    say(f"undisturbed: {quiet.step} steps in {options.seconds:g} s")
    lossy = train(folder / "losses", options.seconds, options.every)
    back = ", ".join(f"{each:.1f}" for each in lossy.returns)
    say(
        f"a worker lost every {options.every:g} s: {lossy.step} steps, {len(lossy.losses)} losses, "
        f"{lossy.restarts} restarts counted; seconds from a loss to progress again: {back}"
    )
    say(f"goodput: {lossy.step / quiet.step:.2f}")
    return 0


def train(folder: Path, seconds: float, every: float) -> Course:
    """Train for so many seconds since the first progress, and take a worker away now and then."""
    folder.mkdir(parents=True)
    with real_cluster(folder / "kubernetes") as kube:
        environment = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}
        options = [f"--set={name}={value}" for name, value in SETTINGS.items()]
        options.append(f"--set=storage.root={storage.uri_of(folder / 'store')}")
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
    is_back = True

    def tick() -> None:
        """Take a worker away at each multiple of `every`, and end the run after `seconds`."""
        began = time.monotonic()
        for number in itertools.count(1):
            at = number * every
            if over.wait(min(at, seconds) - (time.monotonic() - began)) or at >= seconds:
                break
            course.losses.append(time.monotonic())
            kube.take_away(f"worker-{number % WORKERS}", "EvictionByEvictionAPI")
        process.send_signal(signal.SIGTERM)

    for event in events_of(process, workdir, {}):
        if isinstance(event, Progress) and clock is None:
            clock = threading.Thread(target=tick, daemon=True)
            clock.start()
        course.restarts += isinstance(event, Restart)
        is_back = is_back and not (isinstance(event, AttemptBegin) and event.resumed)
        if not is_back and isinstance(event, Progress):
            is_back = True
            course.returns.append(time.monotonic() - course.losses[-1])
    over.set()
    assert clock, f"training has not begun; see {workdir.parent}"
    clock.join()
    return course


def say(text: str) -> None:
    """Print a line, and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
