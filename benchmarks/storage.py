"""What object storage costs: many small files, and checkpoints while training goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.figures import Figure, alternating
from trainer import storage
from trainer.storage import parallel

FILES, BYTES, LATENCY = 300, 20_000, 0.03
ROUNDS = 3
BUCKET = "flotilla-bench"
# Long enough for a few checkpoints at every 10 s.
STEPS = 12_000
TRAINING_ROUNDS = 5
EVERY = 10.0


def many_files() -> Figure:
    """Publish 300 files of 20 KB at 30 ms a request: side by side, and one by one."""
    with tempfile.TemporaryDirectory() as name, gcs(LATENCY) as root:
        folder = Path(name)
        for number in range(FILES):
            (folder / f"{number:03d}").write_bytes(os.urandom(BYTES))
        count = iter(range(1000))

        def published(threads: int) -> float:
            with mock.patch.object(parallel, "THREADS", threads):
                began = time.monotonic()
                storage.publish(folder, storage.join(root, f"{next(count)}"), kind="bench")
                return time.monotonic() - began

        storage.is_published(root)
        seconds = alternating(ROUNDS, lambda: published(1), lambda: published(parallel.THREADS))
    return Figure(
        figure="300 files of 20 KB published at 30 ms a request, against one by one",
        rounds=tuple(alone / together for alone, together in seconds),
        at_least=7,
        more={"seconds": [round(together, 2) for _, together in seconds]},
    )


def checkpoints() -> Figure:
    """Train with a checkpoint every 10 s in a bucket, and with the first and the last alone."""
    stalls: list[float] = []
    with tempfile.TemporaryDirectory() as name, gcs(LATENCY) as root:
        dataset = _ended(Path(name), root, "prepare")["artifacts"]["dataset"]

        def speed(every: float) -> float:
            folder, rows = _trained(Path(name), root, dataset, every)
            if every:
                stalls.extend(_stalls(folder))
            return rows

        pairs = alternating(TRAINING_ROUNDS, lambda: speed(EVERY), lambda: speed(0.0))
    return Figure(
        figure="steps/s with a checkpoint every 10 s in a bucket, against none",
        rounds=tuple(kept / none for kept, none in pairs),
        at_least=0.97,
        more={
            "steps_per_second": [[round(each, 1) for each in pair] for pair in pairs],
            "stall_seconds": round(median(stalls), 4) if stalls else None,
            "checkpoints": len(stalls),
        },
    )


@contextmanager
def gcs(latency: float) -> Iterator[str]:
    """Run a server of Google Cloud Storage in a process of its own; yield the URI of a bucket."""
    command = [sys.executable, "-m", "tests.stores", "gs", BUCKET, str(latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        url = own.stdout.readline().strip()
        try:
            with mock.patch.dict(os.environ, STORAGE_EMULATOR_HOST=url):
                yield f"gs://{BUCKET}/bench"
        finally:
            own.stdin.close()


def _trained(workdir: Path, root: str, dataset: str, every: float) -> tuple[Path, float]:
    """Return the folder of a run, and its steps/s over all of training, checkpoints included."""
    settings = {
        "training.steps": STEPS,
        "training.validate_every": 0,
        "training.checkpoint_every": STEPS,
        "training.checkpoint_seconds": every,
    }
    told = _ended(workdir, root, "train", "--dataset", dataset, **settings)
    folder = workdir / told["run_id"]
    progress = [each for each in _events(folder) if each["event"] == "progress"]
    # The first stretch traces and compiles.
    first, last = progress[0], progress[-1]
    steps = last["global_step"] - first["global_step"]
    return folder, steps / (last["time"] - first["time"])


def _stalls(folder: Path) -> list[float]:
    """Return the seconds for which training stood still for each checkpoint on its way."""
    saved = [each for each in _events(folder) if each["event"] == "saved"]
    return [each["seconds"] for each in saved if 0 < each["global_step"] < STEPS]


def _events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _ended(workdir: Path, root: str, *words: str, **settings: object) -> dict[str, Any]:
    command = [str(Path(sys.executable).with_name("flotilla")), *words, "--json"]
    command += ["--workdir", str(workdir)]
    for key, value in {**settings, "storage.root": root}.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))
