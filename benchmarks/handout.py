"""Measures how many updates per second one chief dispatches to stub workers over loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

import psutil

from benchmarks.baselines.cluster import free_ports
from benchmarks.comparisons import Comparison
from flotilla.trainer.runtime import signals

# Number of stub workers. The server of each one needs 45 MB and 93 threads on 2 cores, or 60 MB and
# 145 threads on 16 cores.
WORKERS = int(os.environ.get("BENCH_STUBS", "64"))
# Maximum number of workers in one process.
TOGETHER = 64
# Updates per turn; see `flotilla.trainer.strategies.async_parameter_server`.
TURN = 20
SECONDS = 5.0
ROUNDS = 2
# Time limit of a round in seconds, because a deadlocked fleet never ends.
LIMIT_SECONDS = 240.0
# A program that runs the servers of several tasks of one role. They all report as the same worker.
_SERVE = """
import json, sys
import tensorflow as tf
path, role, first, count, threads = sys.argv[1:]
# Workers of one process share these. Each worker's loop holds one; with too few, all wait forever.
settings = tf.compat.v1.ConfigProto(
    device_count={"CPU": 1},
    inter_op_parallelism_threads=int(threads),
    intra_op_parallelism_threads=1,
)
settings.experimental.disable_thread_spinning = True
spec = tf.train.ClusterSpec(json.load(open(path)))
servers = [
    tf.distribute.Server(spec, role, int(first) + each, config=settings)
    for each in range(int(count))
]
print("serving", flush=True)
servers[0].join()
"""


def handed_out(workers: int = WORKERS) -> Comparison:
    """Measure the updates per second that one chief dispatches to stub workers, without a model."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        rounds = [measured(Path(name) / f"{each}", workers) for each in range(ROUNDS)]
    return Comparison(
        name=f"updates/s that one chief dispatches to {workers:,} stub workers",
        rounds=tuple(each["updates_per_second"] for each in rounds),
        at_least=2_000,
        more={"runs": rounds},
    )


def measured(folder: Path, workers: int, seconds: float = SECONDS) -> dict[str, Any]:
    """Return the results of `benchmarks.stubs` for a fleet, and the memory of its tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = iter(free_ports(workers + 2))
    counts = {"ps": 1, "worker": workers, "chief": 1}
    spec = {role: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for role, n in counts.items()}
    path = folder / "spec.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    threads = 16 + workers
    with ExitStack() as all_of_them:
        processes = [
            all_of_them.enter_context(_process(folder, ["-c", _SERVE, path, "ps", 0, 1, threads]))
        ]
        for first in range(0, workers, TOGETHER):
            words = ["-c", _SERVE, path, "worker", first, min(TOGETHER, workers - first), threads]
            processes.append(all_of_them.enter_context(_process(folder, words)))
        for each in processes:
            _line(each)
        chief = all_of_them.enter_context(
            _process(folder, ["-m", "benchmarks.stubs", path, seconds])
        )
        limit = Timer(LIMIT_SECONDS, chief.kill)
        limit.start()
        all_of_them.callback(limit.cancel)
        _line(chief)
        used = [_seconds_of(each) for each in processes]
        limit = Timer(LIMIT_SECONDS, chief.kill)
        limit.start()
        all_of_them.callback(limit.cancel)
        _line(chief)
        used = [_seconds_of(each) - before for each, before in zip(processes, used, strict=True)]
        found: dict[str, Any] = json.loads(_line(chief))
        made = found["updates_per_second"] * found["seconds"]
        found["server_cpu_per_turn"] = used[0] / made * TURN
        found["worker_cpu_per_turn"] = sum(used[1:]) / made * TURN
        found["resident_megabytes"] = [
            psutil.Process(each.pid).memory_info().rss >> 20 for each in processes
        ]
    return found


@contextmanager
def _process(folder: Path, words: list[Any]) -> Iterator[subprocess.Popen[str]]:
    settings = {
        **os.environ,
        **signals.parent_environment(),
        "GRPC_FAIL_FAST": "use_caller",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    own = folder / "-".join(map(str, words[3:]))
    own.mkdir()
    # A worker reads its number from a file in its working directory.
    (own / "number.txt").write_text("0", encoding="utf-8")
    command = [sys.executable, *map(str, words)]
    with (own / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=own, env=settings, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _seconds_of(process: subprocess.Popen[str]) -> float:
    used = psutil.Process(process.pid).cpu_times()
    return float(used.user + used.system)


def _line(process: subprocess.Popen[str]) -> str:
    if process.stdout is None or not (line := process.stdout.readline()):
        raise RuntimeError(f"a stub has ended with code {process.wait()}")
    return line
