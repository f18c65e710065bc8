"""Whether the memory of a task grows while it trains: each run looked at at two moments."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.comparisons import Comparison
from benchmarks.watched import Look, watched
from trainer.config.load import load_config

ROUNDS = 3
EARLY, LATE = 5_000, 50_000
# Some steps come after the last look, so that the tasks are still there.
STEPS = LATE + 1_000
# A small model with small batches, so that the steps are many.
SETTINGS: Mapping[str, Any] = {
    "model.name": "softmax",
    "model.args": "{}",
    "training.steps": STEPS,
    "training.batch_size": 16,
    "training.checkpoint_every": 5_000,
    "training.validate_every": 5_000,
}
JUDGED = ("chief", "worker")
TASKS = ("chief-0", "ps-0", "worker-0", "worker-1")


def memory() -> Comparison:
    """Resident bytes of chief and workers after 50,000 steps, over those after 5,000."""
    config = load_config(None, [f"{key}={value}" for key, value in SETTINGS.items()])
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        runs = [watched(config, Path(name) / f"{each}", [EARLY, LATE]) for each in range(ROUNDS)]
    return Comparison(
        name=f"memory of chief and workers after {LATE:,} steps, over that after {EARLY:,}",
        rounds=tuple(worst_growth(early, late) for early, late in runs),
        at_most=1.05,
        more={
            "megabytes": [
                {task: [look.tasks[task].resident_bytes >> 20 for look in run] for task in TASKS}
                for run in runs
            ]
        },
    )


def worst_growth(early: Look, late: Look) -> float:
    """Return the largest ratio of late to early memory over chief and workers."""
    return max(
        late.tasks[task].resident_bytes / used.resident_bytes
        for task, used in early.tasks.items()
        if task.startswith(JUDGED)
    )
