"""The metrics of a task over examples that a model has predicted."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.tasks.base import Examples
from trainer.tasks.objective import Objective


def measured(objective: Objective, examples: Examples) -> dict[str, Any]:
    """Return what `metrics.json` says: `metrics`, `intervals`, and the details of the task."""
    sums = sum(objective.sums(part) for part in examples.parts())
    details = objective.task.details(examples)
    means = objective.measured(np.asarray(sums))
    return {
        **details,
        "metrics": {**means, **details.get("metrics", {})},
        "intervals": details.get("intervals", {}),
    }
