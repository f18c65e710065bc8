"""Tests metrics of slices, where a slice is all examples with the same value of a feature."""

import numpy as np
import pytest

from flotilla.trainer.evaluation.slices import MOST_VALUES, OTHER, slice_metrics
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.classification import BinaryClassification
from flotilla.trainer.tasks.objective import Objective
from tests.trainer.objectives import of_classes
from tests.trainer.tasks.measuring import InParts


def cut(values, labels, logits, names=()):
    """Return the slices by one column, computed from small parts of the examples."""
    examples = InParts(labels, logits, column=np.asarray(values))
    return slice_metrics(of_classes(2), examples, {"column": names})["column"]


def parts(values, names=()):
    labels = np.arange(len(values)) % 2
    rows = cut(values, labels, np.eye(2, dtype=np.float32)[labels], names)
    assert sum(row["examples"] for row in rows) == len(values), "every example is in one part"
    return {row["value"]: row["examples"] for row in rows}


def test_metrics_are_those_of_the_part_alone():
    labels = np.array([0, 0, 0, 1, 1, 1])
    logits = np.eye(2, dtype=np.float32)[[0, 0, 1, 1, 1, 1]]
    rows = cut(np.array([b"x", b"x", b"x", b"y", b"y", b"y"], object), labels, logits)
    assert [(row["value"], row["metrics"]["accuracy"]) for row in rows] == [
        ("x", pytest.approx(2 / 3)),
        ("y", 1.0),
    ]
    low, high = rows[0]["intervals"]["accuracy"]
    assert low < 2 / 3 < high
    # Three correct predictions out of three may be due to chance.
    low, high = rows[1]["intervals"]["accuracy"]
    assert (low, high) == (pytest.approx(0.438, abs=1e-3), 1.0)


def test_few_values_are_listed_one_by_one_and_classes_by_their_names():
    assert parts([0, 1, 1], ("cat", "dog")) == {"cat": 1, "dog": 2}
    assert parts([3, 1, 3]) == {"1": 1, "3": 2}
    assert parts([True, False, True]) == {"False": 1, "True": 2}
    assert parts([0.5, np.nan, np.nan, -np.inf]) == {"0.5": 1, "nan": 2, "-inf": 1}
    assert parts(np.array(["ö".encode(), b"\xff"], object)) == {"ö": 1, "\ufffd": 1}


def test_many_numbers_are_cut_into_quarters():
    assert parts(np.arange(100)) == {
        "0 to 24.75": 25, "24.75 to 49.5": 25, "49.5 to 74.25": 25, "74.25 to 99": 25,
    }  # fmt: skip
    found = parts([*np.linspace(0, 1, 50), np.nan, np.inf])
    assert found.pop("not finite") == 2
    assert len(found) == 4
    assert parts([0] * 300 + list(range(30))) == {"0 to 29": 330}
    large = np.float32(3e38) * np.linspace(-1, 1, 100, dtype=np.float32)
    assert [*parts(large).values()] == [25, 25, 25, 25]


def test_of_many_texts_the_most_frequent_are_kept():
    values = [f"w{n}".encode() for n in range(40) for _ in range(40 - n)]
    found = parts(values)
    assert len(found) == MOST_VALUES
    assert found["w0"] == 40
    assert found[OTHER] == sum(range(1, 22))


def test_what_weighs_nothing_is_in_no_part():
    labels = np.array([0, 1, 0, 1])
    values, weights = np.array([1, 1, 2, 3]), np.array([1, 1, 0, 1], np.float32)
    logits = np.eye(2, dtype=np.float32)[labels]
    examples = InParts(labels, logits, weights, column=values)
    rows = slice_metrics(of_classes(2), examples, {"column": ()})["column"]
    assert [(row["value"], row["examples"]) for row in rows] == [("1", 2), ("3", 1)]
    assert [row["metrics"]["accuracy"] for row in rows] == [1, 1]


def test_a_part_of_one_class_says_which_metrics_it_does_not_define():
    task = BinaryClassification(Target(name="label", shape=(), dtype="int64"))
    labels = np.array([0, 1, 1])
    examples = InParts(labels, np.zeros((3, 1), np.float32), column=np.array([1, 1, 2]))
    both, one = slice_metrics(Objective(task), examples, {"column": ()})["column"]
    assert both["metrics"]["auc"] == 0.5
    assert one["metrics"]["auc"] is None
    assert one["examples"] == 1
