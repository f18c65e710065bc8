"""Measures the memory of tasks at several steps of a run, to see whether it grows in training."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparisons import Comparison
from benchmarks.watched import Look, watched
from flotilla.trainer.config.load import load_config

ROUNDS = 3
EARLY, LATE = 5_000, 50_000
# Training continues after the last measurement, so that the tasks still run at that time.
STEPS = LATE + 1_000
# A small model with small batches runs many steps per second.
SETTINGS: Mapping[str, Any] = {
    "model.name": "softmax",
    "model.args": "{}",
    "training.steps": STEPS,
    "training.batch_size": 16,
    # The first checkpoint and validation trace graphs, so they come before the first measurement.
    "training.checkpoint_every": EARLY // 2,
    "training.validate_every": EARLY // 2,
}
# The table is full long before the first measurement, and constantly reassigns rows to new ids.
OF_TABLE: Mapping[str, Any] = {
    **SETTINGS,
    "model.name": "benchmarks.growing_tables:drifting",
    "training.optimizer": "{name: adagrad, learning_rate: 0.1}",
    "export.formats": "[saved_model]",
}
TABLE_LOOKS = (EARLY, 10_000, 20_000, 30_000, 40_000, LATE)
JUDGED = ("chief", "worker")
TASKS = ("chief-0", "ps-0", "worker-0", "worker-1")


def memory() -> Comparison:
    """Compare the resident memory of chief and workers after 50,000 steps and after 5,000 steps."""
    runs = _runs(SETTINGS, (EARLY, LATE), ROUNDS)
    return Comparison(
        name=f"memory of chief and workers after {LATE:,} steps, compared with {EARLY:,} steps",
        rounds=tuple(worst_growth(run[0], run[-1]) for run in runs),
        at_most=1.05,
        more={"megabytes": [_megabytes(run) for run in runs]},
    )


def table_memory() -> Comparison:
    """Compare the memory of all tasks after the same numbers of steps, with a full table."""
    (run,) = _runs(OF_TABLE, TABLE_LOOKS, 1)
    return Comparison(
        name=f"memory with a full table after {LATE:,} steps, compared with {EARLY:,} steps",
        rounds=(worst_growth(run[0], run[-1], TASKS),),
        at_most=1.05,
        more={
            "steps": [look.global_step for look in run],
            "megabytes": _megabytes(run),
            "evicted": [look.metrics["tables"]["table"]["evicted"] for look in run],
        },
    )


def _runs(settings: Mapping[str, Any], steps: Sequence[int], count: int) -> list[tuple[Look, ...]]:
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        return [watched(config, Path(name) / f"{each}", list(steps)) for each in range(count)]


def _megabytes(run: Sequence[Look]) -> dict[str, list[int]]:
    return {task: [look.tasks[task].resident_bytes >> 20 for look in run] for task in TASKS}


def worst_growth(early: Look, late: Look, judged: Collection[str] = JUDGED) -> float:
    """Return the largest ratio of late to early memory among the tasks of the judged roles."""
    return max(
        late.tasks[task].resident_bytes / used.resident_bytes
        for task, used in early.tasks.items()
        if task.startswith(tuple(judged))
    )
