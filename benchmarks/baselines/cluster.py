"""Runs the published parameter-server program with one server and several workers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.trainer.runtime import signals

# Share of the training time that is skipped at the start of the measurement.
_WARM = 0.1
# Interval at which the tasks are checked, in seconds.
_LOOK = 0.05


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of the program.

    Attributes:
        steps_per_second: global steps per second while all workers trained.
        local_steps: the number of local steps of each worker.
        kept: for each snapshot, the seconds since all workers started, the global step and the
            file.
    """

    steps_per_second: float
    local_steps: tuple[int, ...]
    kept: tuple[tuple[float, int, Path], ...]


def free_ports(count: int) -> list[int]:
    """Return free local ports. All are bound at the same time, so they are distinct."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def train(
    folder: Path, *, steps: int, workers: int = 2, sync: bool = False, snapshots: int = 0
) -> Trained:
    """Run the program up to a global step.

    If `snapshots` is set, keep the weights every `snapshots` steps.

    Workers write the weights when they exit, which not all of them do in synchronous training.

    Raises:
        ValueError: snapshots are requested for synchronous training.
        RuntimeError: a task failed; its log has the reason.
    """
    if sync and snapshots:
        raise ValueError("snapshots of the weights need asynchronous training")
    folder.mkdir(parents=True)
    ps, *ports = free_ports(1 + workers)
    where = ["--ps", f"localhost:{ps}", "--workers", *map(str, ports)]
    what = ["--steps", str(steps), "--snapshots", str(snapshots), *(["--sync"] if sync else [])]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.append(_start(folder, "ps", where))
        for index in range(workers):
            started.append(_start(folder, f"worker-{index}", [*where, *what], index))
        # In synchronous training, the last worker waits forever for the gradients of the others.
        wait(started[0], started[1:], until=1 if sync else workers)
    except RuntimeError as error:
        raise RuntimeError(f"{error}: {_last_words(folder)}") from None
    finally:
        for process in started:
            process.kill()
            process.wait()
    return _trained(folder, workers)


def wait(
    server: subprocess.Popen[bytes], workers: Sequence[subprocess.Popen[bytes]], until: int
) -> None:
    """Wait until `until` workers have succeeded.

    Raises:
        RuntimeError: a worker failed, or the server exited.
    """
    while (ended := [each.poll() for each in workers]).count(0) < until:
        if any(ended) or server.poll() is not None:
            raise RuntimeError("a task of the TensorFlow 1 program has failed")
        # Poll, because there is no portable way to wait for one of several processes.
        time.sleep(_LOOK)


def _last_words(folder: Path) -> str:
    lines = (path.read_text(errors="replace").splitlines() for path in folder.glob("*.log"))
    return "; ".join(each[-1] for each in lines if each)


def _start(folder: Path, name: str, words: list[str], index: int = 0) -> subprocess.Popen[bytes]:
    job = name.partition("-")[0]
    command = [sys.executable, "-m", "benchmarks.baselines.parameter_server", "--job", job]
    command += ["--index", str(index), "--record", str(folder / f"{name}.json"), *words]
    environment = {**os.environ, **signals.parent_environment()}
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def _trained(folder: Path, workers: int) -> Trained:
    results = [
        json.loads((folder / f"worker-{index}.json").read_text(encoding="utf-8"))
        for index in range(workers)
    ]
    begin = max(each["marks"][0][0] for each in results)
    end = min(each["marks"][-1][0] for each in results)
    begin_measured = begin + _WARM * (end - begin)
    return Trained(
        steps_per_second=_speed(results[0]["marks"], begin_measured, end),
        local_steps=tuple(each["local_steps"] for each in results),
        kept=tuple(
            (when - begin, step, folder / f"weights-{number:04d}.npz")
            for number, (when, step) in enumerate(results[0]["kept"])
        ),
    )


def _speed(marks: list[Any], begin: float, end: float) -> float:
    inside = [mark for mark in marks if begin <= mark[0] <= end]
    (began, first), (ended, last) = inside[0], inside[-1]
    return float((last - first) / (ended - began))
