"""Helpers that compute the metrics of a task on given examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.evaluation import predictions
from flotilla.trainer.tasks.base import Part, Target
from flotilla.trainer.tasks.objective import Objective, select_rows


class InParts:
    def __init__(self, labels, outputs, weights=None, *, size=7, **columns) -> None:
        self.whole, self.size = Part(labels, outputs, weights, columns), size

    @property
    def count(self) -> int:
        return len(tf.nest.flatten(self.whole.labels)[0])

    def parts(self):
        for begin in range(0, self.count, self.size):
            yield select_rows(self.whole, slice(begin, begin + self.size))


def measured(task, examples: InParts) -> dict[str, float]:
    """Return the metrics as a validation computes them, from sums over the parts."""
    objective = Objective(task)
    return objective.means(np.sum([objective.sums(part) for part in examples.parts()], axis=0))


def evaluated(task, examples: InParts) -> dict[str, Any]:
    return predictions.measure_predictions(Objective(task), examples)


def check_validation(task, labels, outputs, *, weighted: bool) -> None:
    """Check that a validation finds what an evaluation finds, and the mean of the losses."""
    count = InParts(labels, outputs).count
    weights = np.random.default_rng(2).uniform(size=count).astype("float32") if weighted else None
    examples = InParts(labels, outputs, weights)
    found, expected = measured(task, examples), evaluated(task, examples)["metrics"]
    assert set(found) <= set(expected) <= set(task.directions)
    for name, value in found.items():
        # A validation computes areas from histograms.
        is_area = name.endswith(("auc", "average_precision"))
        wanted = pytest.approx(expected[name], rel=1e-4, abs=0.01 if is_area else 1e-6)
        assert value == wanted, name
    if not weighted:
        mean = task.example_losses(labels, outputs).mean()
        assert found["loss"] == pytest.approx(mean, rel=1e-4)


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
