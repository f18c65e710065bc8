"""Runs of 1 to 16 workers on this machine, and what each role has used of its cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import launched
from benchmarks.scaling.model import Point
from benchmarks.watched import Look, watched
from trainer.config.base import MOST
from trainer.strategies.async_parameter_server import LONG_RUN

WORKERS = (1, 2, 4, 8, 16)
# As many as there are workers at most.
SHARDS = max(WORKERS)
ROUNDS = 3
STEPS = 6000
# Of the runs that are there for the model's size and `pull_every`, and not for the workers.
FEW = 2
PULL_EVERY = 10
# Where tracing is over, and where it is measured to; some steps come after, so that all tasks are
# still there. A share of all steps.
FIRST, LAST = 0.3, 0.7
MODELS: dict[str, tuple[str, str]] = {
    "softmax": ("softmax", "{}"),
    "784-100-10": ("mlp", "{hidden_units: [100]}"),
    "784-1000-10": ("mlp", "{hidden_units: [1000]}"),
}
MIDDLE = "784-100-10"


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one run is; `steps` are updates, and checkpoints are made every so many of them."""

    model: str
    workers: int
    pull_every: int
    steps: int
    checkpoint_every: int = MOST


def cases() -> Iterator[Case]:
    """Yield all runs: each model with two values of `pull_every`, one with many workers."""
    for model in MODELS:
        large = model == "784-1000-10"
        yield Case(model=model, workers=FEW, pull_every=1, steps=LONG_RUN if large else STEPS)
        yield Case(
            model=model, workers=FEW, pull_every=PULL_EVERY, steps=500 if large else LONG_RUN
        )
    for workers in WORKERS:
        if workers != FEW:
            yield Case(model=MIDDLE, workers=workers, pull_every=1, steps=STEPS)


# The same as one of them with too few steps for turns. It is over in seconds: checkpoints end
# stretches where it is looked at.
LOOPED = Case(
    model=MIDDLE,
    workers=FEW,
    pull_every=1,
    steps=LONG_RUN - 100,
    checkpoint_every=int(FIRST * (LONG_RUN - 100)),
)


def measured(case: Case, dataset: str, workdir: Path) -> Point:
    """Run a case below a folder; `dataset` is the URI of MNIST with a shard for each worker."""
    name, arguments = MODELS[case.model]
    config = launched.configuration(
        {
            "model.name": name,
            "model.args": arguments,
            "training.steps": case.steps,
            "training.pull_every": case.pull_every,
            "training.checkpoint_every": case.checkpoint_every,
            "data.shards": SHARDS,
            "cluster.workers": case.workers,
        }
    )
    steps = [int(FIRST * case.steps), int(LAST * case.steps)]
    first, last = watched(config, workdir, steps, dataset)
    return point(case, sum(sizes(case.model)), (first, last))


def point(case: Case, size: int, looks: Sequence[Look]) -> Point:
    """Return what one update of a run has cost between two looks; `size` is in bytes."""
    first, last = looks
    updates = last.global_step - first.global_step

    def cost(role: str) -> float:
        names = [task for task in last.tasks if task.startswith(role)]
        return sum(last.tasks[t].cpu_seconds - first.tasks[t].cpu_seconds for t in names) / updates

    return Point(
        model=case.model,
        bytes=size,
        workers=case.workers,
        pull_every=case.pull_every,
        worker=cost("worker"),
        server=cost("ps"),
        chief=cost("chief"),
        rate=updates / (last.time - first.time),
    )


def sizes(model: str) -> list[int]:
    """Return the bytes of each variable of a model."""
    name, arguments = MODELS[model]
    built = launched.model({"model.name": name, "model.args": arguments})
    return [each.value.shape.num_elements() * each.value.dtype.size for each in built.variables]


def all_measured(folder: Path, say: Callable[[str], Any]) -> list[Point]:
    """Run all cases below a folder, each in every round; the last one is `LOOPED`.

    Of each case the run of median speed is returned: a machine has slow minutes.
    """
    dataset = launched.prepared(folder / "data", {"data.shards": SHARDS})
    wanted = [*cases(), LOOPED]
    found: list[list[Point]] = [[] for _ in wanted]
    for round_ in range(ROUNDS):
        for number, case in enumerate(wanted):
            say(f"{round_ + 1} of {ROUNDS}: {case} ...\n")
            found[number].append(measured(case, dataset, folder / f"{round_}-{number:02d}"))
    return [sorted(each, key=lambda point: point.rate)[ROUNDS // 2] for each in found]
