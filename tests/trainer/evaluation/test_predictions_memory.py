"""No pass over the examples holds an array of all of them."""

from __future__ import annotations

import gc
import tracemalloc
from contextlib import closing

import numpy as np
import pytest

from tests.trainer.tasks.measuring import target
from trainer.evaluation import columns
from trainer.evaluation.predictions import Writer, measured
from trainer.evaluation.slices import sliced
from trainer.tasks import base
from trainer.tasks.base import Part
from trainer.tasks.classification import Classification
from trainer.tasks.objective import Objective
from trainer.tasks.regression import Regression

FEW, MANY, AT_ONCE, CLASSES = 10_000, 100_000, 2_500, 3


def batch(generator, classes):
    labels = generator.integers(0, CLASSES, AT_ONCE)
    outputs = generator.normal(size=(AT_ONCE, CLASSES if classes else 1)).astype(np.float32)
    weights = np.ones(AT_ONCE, np.float32)
    given = labels if classes else labels.astype(np.float32)
    return Part(given, outputs, weights, {"column": generator.integers(0, 50, AT_ONCE)})


def peak(task, count, folder):
    """Return the most bytes of arrays while so many examples are written and measured."""
    generator, objective = np.random.default_rng(0), Objective(task)
    gc.collect()
    tracemalloc.start()
    try:
        with closing(Writer(folder / "predictions", folder / "columns", count)) as writer:
            for _ in range(count // AT_ONCE):
                writer.add_batch(batch(generator, bool(task.labels)))
            stored = writer.stored("output")
        found = measured(objective, stored)
        parts = sliced(objective, stored, {"column": ()})["column"]
        assert sum(row["examples"] for row in parts) == count == stored.count
        assert found["metrics"]["loss"] > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", [Classification(target([0, 1, 2], num_classes=CLASSES)), Regression(target([0.0, 2.0]))]
)
def test_many_times_the_examples_take_no_more_memory(task, tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MOST_ROWS", AT_ONCE)
    monkeypatch.setattr(base.drawn, "__defaults__", (AT_ONCE,))
    # What is imported and traced once is no array of examples.
    peak(task, AT_ONCE, tmp_path / "first")
    few, many = (peak(task, count, tmp_path / f"{count}") for count in (FEW, MANY))
    # The predictions of a regression alone are 4 bytes each.
    assert many < few + 4 * (MANY - FEW)
