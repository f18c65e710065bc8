"""Helpers that compute the metrics of a task on given examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.evaluation import predictions
from flotilla.trainer.tasks.base import Part, Target
from flotilla.trainer.tasks.objective import Objective


class InParts:
    def __init__(self, labels, outputs, weights=None, **columns) -> None:
        self.whole = Part(labels, outputs, weights, columns)

    @property
    def count(self) -> int:
        return len(tf.nest.flatten(self.whole.labels)[0])

    def parts(self):
        for begin in range(0, self.count, 7):
            yield tf.nest.map_structure(
                lambda each, at=slice(begin, begin + 7): None if each is None else each[at],
                self.whole,
            )


def measured(task, examples: InParts) -> dict[str, float]:
    """Return the metrics as a validation computes them, from sums over the parts."""
    objective = Objective(task)
    return objective.means(np.sum([objective.sums(part) for part in examples.parts()], axis=0))


def evaluated(task, examples: InParts) -> dict[str, Any]:
    return predictions.measure_predictions(Objective(task), examples)


def target(values, /, name="label", **facts) -> Target:
    """Return the target of a dataset with these training labels."""
    values = np.asarray(values)
    moments = {}
    if values.dtype.kind in "iubf":
        moments = {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "min": float(values.min()),
            "max": float(values.max()),
        }
    if values.dtype.kind in "iub":
        count = np.bincount(values[values >= 0].ravel().astype(int)).tolist()
        facts.setdefault("counts", {"train": count, "test": count})
    return Target(
        name=name, shape=values.shape[1:], dtype=values.dtype.name, moments=moments, **facts
    )
