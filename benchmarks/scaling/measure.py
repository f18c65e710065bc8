"""Measures the cost of each role with 1 to 16 workers and 1 to 4 servers on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import launched
from benchmarks.scaling import gradient
from benchmarks.scaling.fit import Point
from benchmarks.scaling.gradient import MODELS
from benchmarks.watched import Look, watched
from flotilla.trainer.config.base import MOST
from flotilla.trainer.strategies.async_parameter_server import LONG_RUN

WORKERS = (1, 2, 4, 8, 16)
# Runs that the constants are not fitted to; they test the predictions.
HELD_OUT = ((8, 1), (2, 2), (4, 3))
# One shard for each worker of the largest run.
SHARDS = max(WORKERS)
STEPS = 6000
# Steps of runs with more than FEW workers. Each half of the measured part must take longer than a
# second, the interval of progress reports.
MANY_STEPS = 2 * STEPS
# Number of workers in runs that vary the model and `pull_every`.
FEW = 2
PULL_EVERY = 10
# Shares of all steps at which to measure. At the first, tracing has ended. After the last, training
# continues, so that all tasks still run.
FIRST, HALF, LAST = 0.3, 0.5, 0.7
MIDDLE = "784-100-10"
# Steps of runs with PULL_EVERY. Each run takes several seconds, because progress is reported once
# per second.
LOCAL_STEPS = {"softmax": STEPS, MIDDLE: LONG_RUN, "784-1000-10": 500}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of one run. `steps` and `checkpoint_every` count updates."""

    model: str
    workers: int
    pull_every: int
    steps: int
    servers: int = 1
    checkpoint_every: int = MOST

    @property
    def fitted(self) -> bool:
        """Whether the constants are fitted to this run."""
        return (self.workers, self.servers) not in HELD_OUT


def cases() -> Iterator[Case]:
    """Yield all runs: each model with two values of `pull_every`, and one with other clusters."""
    for model in MODELS:
        large = model == "784-1000-10"
        yield Case(model=model, workers=FEW, pull_every=1, steps=LONG_RUN if large else STEPS)
        steps = LOCAL_STEPS[model]
        yield Case(model=model, workers=FEW, pull_every=PULL_EVERY, steps=steps)
    others = ((workers, 1) for workers in WORKERS if workers != FEW)
    for workers, servers in (*others, (2, 2), (4, 3), (2, 4)):
        steps = MANY_STEPS if workers > FEW else STEPS
        yield Case(model=MIDDLE, workers=workers, servers=servers, pull_every=1, steps=steps)
    # This run has too few steps for turns, and takes only seconds. It saves checkpoints, so that it
    # reports progress at the measured steps.
    steps = LONG_RUN - 100
    every = int(FIRST * steps)
    yield Case(model=MIDDLE, workers=FEW, pull_every=1, steps=steps, checkpoint_every=every)


def measured(case: Case, found: dict[str, Any], dataset: str, workdir: Path) -> Point:
    """Run a case below `workdir`. `found` has the measured gradient of its model."""
    config = launched.configuration(
        {
            **gradient.settings_of(case.model),
            "training.steps": case.steps,
            "training.pull_every": case.pull_every,
            "training.checkpoint_every": case.checkpoint_every,
            "data.shards": SHARDS,
            "cluster.workers": case.workers,
            "cluster.parameter_servers": case.servers,
        }
    )
    shares = (FIRST, HALF, LAST) if case.workers > FEW else (FIRST, LAST)
    looks = watched(config, workdir, [int(each * case.steps) for each in shares], dataset)
    # With many workers, turns may begin only after all have started. Tracing the graph of turns
    # then slows down one of the halves.
    halves = [point(case, found, both) for both in pairwise(looks)]
    return min(halves, key=lambda half: half.worker + half.server + half.chief)


def point(case: Case, found: dict[str, Any], looks: Sequence[Look]) -> Point:
    """Return the mean cost of an update between two measurements of a run."""
    first, last = looks
    updates = last.global_step - first.global_step

    def of(role: str) -> list[str]:
        return [task for task in last.tasks if task.startswith(role)]

    def cost(role: str) -> float:
        used = (last.tasks[t].cpu_seconds - first.tasks[t].cpu_seconds for t in of(role))
        return sum(used) / updates

    roles = ("chief", "ps", "worker")
    most = {role: max(last.tasks[t].resident_bytes for t in of(role)) for role in roles}
    return Point(
        model=case.model,
        held=tuple(found["held"][str(case.servers)]),
        gradient=found["gradient"],
        workers=case.workers,
        pull_every=case.pull_every,
        worker=cost("worker"),
        server=cost("ps"),
        chief=cost("chief"),
        rate=updates / (last.time - first.time),
        memory=most,
        fitted=case.fitted,
        looped=case.steps < LONG_RUN and case.model == MIDDLE,
    )


def all_measured(folder: Path, rounds: int, say: Callable[[str], Any]) -> list[Point]:
    """Run all cases below a folder, once per round.

    For each case, returns the run of median speed, because other programs may slow the machine.
    """
    dataset = launched.prepared(folder / "data", {"data.shards": SHARDS})
    found = gradient.measured()
    wanted = list(cases())
    points: list[list[Point]] = [[] for _ in wanted]
    for round_ in range(rounds):
        for number, case in enumerate(wanted):
            say(f"{round_ + 1} of {rounds}: {case} ...\n")
            below = folder / f"{round_}-{number:02d}"
            points[number].append(measured(case, found[case.model], dataset, below))
    return [sorted(each, key=lambda point: point.rate)[rounds // 2] for each in points]
