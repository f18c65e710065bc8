"""Compares the speed of training with published programs and with a single process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import launched
from benchmarks.baselines import cluster
from benchmarks.comparisons import Comparison, alternating

ROUNDS = 3
# Number of rounds for comparisons whose noise is close to the margin.
MORE_ROUNDS = 5
STEPS_OF_BASELINE = 2400
STEPS = 8000
UPDATES = 2000
LOCAL_STEPS = 10


def asynchronous() -> Comparison:
    """Compare global steps per second of asynchronous training with the published program."""

    def own(bench: _Bench) -> float:
        return bench.train("async_parameter_server", STEPS).steps_per_second

    return _compared(
        "asynchronous: global steps/s, compared with the TensorFlow 1 program",
        (2.5, 2.2),
        own,
        lambda bench: bench.baseline(sync=False),
        MORE_ROUNDS,
    )


def synchronous() -> Comparison:
    """Compare updates per second of synchronous training with the published program."""

    def own(bench: _Bench) -> float:
        return bench.train("sync_parameter_server", UPDATES).steps_per_second

    return _compared(
        "synchronous with 2 workers: updates/s, compared with the TensorFlow 1 program",
        (2.0, 1.7),
        own,
        lambda bench: bench.baseline(sync=True),
    )


def local_steps() -> Comparison:
    """Compare the local steps per second of workers that rarely pull with one process alone."""

    def own(bench: _Bench) -> float:
        trained = bench.train(
            "async_parameter_server", STEPS // 4, training__pull_every=LOCAL_STEPS
        )
        return trained.local_steps_per_second

    return _compared(
        "asynchronous with pull_every=10: local steps/s, compared with one process",
        (0.7, 0.6),
        own,
        lambda bench: bench.train("single", STEPS).steps_per_second,
    )


def one_process() -> Comparison:
    """Compare examples per second of one process with `model.fit`."""
    return _compared(
        "single: examples/s, compared with Keras's fit with 500 steps per execution",
        (1.2, 1.0),
        lambda bench: bench.train("single", STEPS).steps_per_second,
        lambda bench: bench.fit(),
    )


def one_process_compiled() -> Comparison:
    """Compare examples per second of one process, compiled by XLA, with `model.fit`."""

    def own(bench: _Bench) -> float:
        return bench.train("single", STEPS, training__jit_compile=True).steps_per_second

    return _compared(
        "single with jit_compile: examples/s, compared with Keras's fit",
        (1.2, 1.0),
        own,
        lambda bench: bench.fit(),
    )


class _Bench:
    """A folder with the dataset, in which runs are executed in sequence."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.local_steps: list[tuple[int, ...]] = []

    def train(self, strategy: str, steps: int, **settings: Any) -> launched.Trained:
        own = {"training__strategy": strategy, "training__steps": steps, **settings}
        return launched.train(self._next(), launched.mnist(), **own)

    def baseline(self, *, sync: bool) -> float:
        steps = STEPS_OF_BASELINE // (2 if sync else 1)
        trained = cluster.train(self._next(), steps=steps, sync=sync)
        self.local_steps.append(trained.local_steps)
        return trained.steps_per_second

    def fit(self) -> float:
        command = [sys.executable, "-m", "benchmarks.baselines.fit"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return float(json.loads(done.stdout.splitlines()[-1])["steps_per_second"])

    def _next(self) -> Path:
        self._count += 1
        return self._folder / f"{self._count:03d}"


def _compared(
    name: str,
    bounds: tuple[float, float],
    own: Callable[[_Bench], float],
    other: Callable[[_Bench], float],
    rounds: int = ROUNDS,
) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        bench = _Bench(Path(folder))
        pairs = alternating(rounds, lambda: own(bench), lambda: other(bench))
    more: dict[str, Any] = {"steps_per_second": [[round(each, 1) for each in p] for p in pairs]}
    if bench.local_steps:
        more["local_steps_of_baseline"] = bench.local_steps
    return Comparison(
        name=name,
        rounds=tuple(mine / theirs for mine, theirs in pairs),
        at_least=bounds[0],
        worst_at_least=bounds[1],
        more=more,
    )
