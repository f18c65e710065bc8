"""Drift: many features that depend on each other are no reason to be alarmed."""

import numpy as np
import pytest

from tests.trainer.data_gate.tables import profile, question, split_of
from trainer.data_gate import drift


def dependent(seed, size=1000, width=40):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=size)
    columns = {f"x{n}": common + 0.1 * rng.normal(size=size) for n in range(width)}
    return profile(split_of({**columns, "label": (rng.random(size) < 0.5).astype(int)}))


@pytest.mark.slow
def test_columns_that_repeat_each_other_count_as_one():
    found = [list(drift.together(question(dependent(n), dependent(n + 100)))) for n in range(40)]
    assert not any(found)


def test_few_features_and_few_rows_are_not_tested_together():
    assert not list(drift.together(question(dependent(0, width=3), dependent(1, width=3))))
    assert not list(drift.together(question(dependent(0, size=30), dependent(1, size=30))))
