"""Measures the cost of object storage: many small files, and checkpoints during training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer import events, storage
from flotilla.trainer.events import Event, Progress, Saved
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import store

FILES, BYTES, LATENCY = 300, 20_000, 0.03
ROUNDS = 3
BUCKET = "flotilla-bench"
TRAINING_ROUNDS = 5
# A run of this many steps writes several checkpoints.
STEPS, MOST_STEPS = 60_000, 1_000_000
EVERY = 10.0
# Length of a window in seconds. A window that starts at a checkpoint is compared with the windows
# before and after it.
WINDOW = 5.0


def many_files() -> Comparison:
    """Compare parallel and sequential publication of 300 files of 20 KB, at 30 ms per request."""
    with tempfile.TemporaryDirectory() as name, gcs(LATENCY) as root:
        folder = Path(name)
        for number in range(FILES):
            (folder / f"{number:03d}").write_bytes(os.urandom(BYTES))
        count = iter(range(1000))

        def published(threads: int) -> float:
            with mock.patch.object(store, "THREADS", threads):
                began = time.monotonic()
                storage.publish(folder, storage.join(root, f"{next(count)}"), kind="bench")
                return time.monotonic() - began

        storage.is_published(root)
        seconds = alternating(ROUNDS, lambda: published(1), lambda: published(store.THREADS))
    return Comparison(
        name="300 files published in parallel, 30 ms per request: speed, compared with one by one",
        rounds=tuple(alone / together for alone, together in seconds),
        at_least=7,
        more={"seconds": [round(together, 2) for _, together in seconds]},
    )


def checkpoints() -> Comparison:
    """Measure the cost of checkpoints in a bucket, within a run.

    The cost of a checkpoint is far below the variation between runs, because training pauses only
    briefly and the upload runs in the background. Therefore the seconds after a checkpoint are
    compared with the seconds before and after them, which also cancels drift. The run saves a
    checkpoint every 15 s; the cost is reported for one every 10 s.
    """
    found: list[list[Taken]] = []
    with tempfile.TemporaryDirectory() as name, gcs(LATENCY) as root:
        dataset = _ended(Path(name), root, "prepare")["artifacts"]["dataset"]
        steps = STEPS
        while len(found) < TRAINING_ROUNDS:
            folder = _trained(Path(name), root, dataset, steps)
            if these := taken(list(events.read(folder / "events.jsonl"))):
                found.append(these)
            elif steps > MOST_STEPS:
                raise UserError(f"{steps} steps ended before a checkpoint had windows around it")
            else:
                # The run was too short on this fast machine; repeat it with more steps.
                steps *= 2
    every = [each for run in found for each in run]
    return Comparison(
        name="checkpoint in a bucket every 10 s: steps/s, compared with no checkpoints",
        rounds=tuple(1 - fmean(each.seconds for each in run) / EVERY for run in found),
        at_least=0.97,
        more={
            "seconds_of_a_checkpoint": [[round(each.seconds, 3) for each in run] for run in found],
            "stall_seconds": round(median(each.stall for each in every), 4),
            "checkpoints": len(every),
        },
    )


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The cost of a checkpoint: the lost seconds of training, and the seconds of the pause."""

    seconds: float
    stall: float


def taken(run_events: Sequence[Event]) -> list[Taken]:
    """Return the cost of each checkpoint that has a whole window before it and two after it."""
    progress = [each for each in run_events if isinstance(each, Progress)]
    times = [each.time for each in progress]
    reached = [each.global_step for each in progress]

    def speed(begin: float) -> float:
        first, last = np.interp([begin, begin + WINDOW], times, reached)
        return float(last - first) / WINDOW

    found = []
    for saved in (each for each in run_events if isinstance(each, Saved)):
        before = [time for time in times if time <= saved.time - saved.seconds]
        # Leave out windows that begin before the second progress report, because graphs are traced
        # and compiled before the first one.
        if not before or not times[1] <= before[-1] - WINDOW < times[-1] - 3 * WINDOW:
            continue
        usual = (speed(before[-1] - WINDOW) + speed(before[-1] + WINDOW)) / 2
        lost = WINDOW * (1 - speed(before[-1]) / usual)
        found.append(Taken(seconds=lost, stall=saved.seconds))
    return found


@contextmanager
def gcs(latency: float) -> Iterator[str]:
    """Run a Google Cloud Storage emulator in another process. Yield the URI of a bucket."""
    command = [sys.executable, "-m", "tests.stores", "gs", BUCKET, str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        url = own.stdout.readline().strip()
        if not url:
            # Without an address, requests would go to the real service.
            raise RuntimeError("the Google Cloud Storage emulator did not start")
        try:
            with mock.patch.dict(os.environ, STORAGE_EMULATOR_HOST=url):
                yield f"gs://{BUCKET}/bench"
        finally:
            own.stdin.close()


def _trained(workdir: Path, root: str, dataset: str, steps: int) -> Path:
    """Train with checkpoints far enough apart for windows without a checkpoint between them.

    Returns the folder of the run.
    """
    settings = {
        "training.steps": steps,
        "training.validate_every": 0,
        "training.checkpoint_every": steps,
        "training.checkpoint_seconds": 3 * WINDOW,
    }
    result = _ended(workdir, root, "train", "--dataset", dataset, **settings)
    return workdir / str(result["run_id"])


def _ended(workdir: Path, root: str, *words: str, **settings: object) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("flotilla")), *words, "--json"]
    command += ["--workdir", str(workdir)]
    for key, value in {**settings, "storage.root": root}.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))
