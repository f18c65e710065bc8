"""Classes of which an example may have several are measured as scikit-learn does."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn import metrics as scores

from tests.trainer.tasks.measuring import InParts, measured, target
from trainer.errors import ConfigError
from trainer.tasks.base import Target
from trainer.tasks.multilabel_classification import MultilabelClassification

COUNT, CLASSES = 60, 4
NAMES = ("a", "b", "c", "d")


def case(dtype="int64", empty=False):
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (COUNT, CLASSES))
    if empty:
        labels[:, 1] = 0
    outputs = (random.normal(size=(COUNT, CLASSES)) + 1.5 * labels).astype("float32")
    task = MultilabelClassification(target(labels.astype(dtype)), labels=NAMES)
    return task, labels.astype(dtype), outputs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_those_of_scikit_learn(dtype, weighted):
    task, labels, outputs = case(dtype)
    weights = np.random.default_rng(2).uniform(size=COUNT).astype("float32") if weighted else None
    found = measured(task, InParts(labels, outputs, weights))
    true, guess = labels.astype(int), outputs > 0
    of = {"sample_weight": weights}
    right = (true == guess).mean(axis=1)
    expected = {
        "binary_accuracy": np.average(right, weights=weights),
        "subset_accuracy": scores.accuracy_score(true, guess, **of),
        "micro_precision": scores.precision_score(true, guess, average="micro", **of),
        "micro_recall": scores.recall_score(true, guess, average="micro", **of),
        "micro_f1": scores.f1_score(true, guess, average="micro", **of),
        "macro_f1": scores.f1_score(true, guess, average="macro", **of),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    area = scores.roc_auc_score(true, outputs, average="macro", **of)
    assert found["auc"] == pytest.approx(area, abs=0.01)
    area = scores.average_precision_score(true, outputs, average="macro", **of)
    assert found["pr_auc"] == pytest.approx(area, abs=0.01)
    assert set(found) == set(task.directions)
    if not weighted:
        mean = task.example_losses(labels, outputs).mean()
        assert found["loss"] == pytest.approx(mean, rel=1e-4)


def test_a_class_without_examples_has_no_part_in_the_mean_area():
    task, labels, outputs = case(empty=True)
    found = measured(task, InParts(labels, outputs))
    able = [0, 2, 3]
    area = scores.roc_auc_score(labels[:, able], outputs[:, able], average="macro")
    assert found["auc"] == pytest.approx(area, abs=0.01)
    rows = task.details(InParts(labels, outputs))["per_class"]
    assert [row["label"] for row in rows if row["auc"] is None] == ["b"]


def test_areas_of_one_kind_of_labels_are_left_out():
    task, labels, outputs = case()
    found = measured(task, InParts(np.zeros_like(labels), outputs))
    assert set(found) == set(task.directions) - {"auc", "pr_auc"}


def test_what_is_said_besides_the_metrics_is_plain_data():
    task, labels, outputs = case()
    details = task.details(InParts(labels, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    each = scores.precision_recall_fscore_support(labels, outputs > 0)
    for name, values in zip(("precision", "recall", "f1", "support"), each, strict=True):
        assert [row[name] for row in details["per_class"]] == pytest.approx(values)
    assert [curve["label"] for curve in details["curves"]] == list(NAMES)
    described = task.described(np.array([0, 1, 0, 1]), np.array([-1.0, -1.0, -1.0, -1.0]))
    assert described == {"label": "b, d", "predicted": "none"}


@pytest.mark.parametrize(
    "wanted", [{"dtype": "string", "shape": (2,)}, {"shape": ()}, {"shape": (2, 2)}]
)
def test_what_is_no_row_is_refused(wanted):
    with pytest.raises(ConfigError, match="it takes a row of 0 and 1, one for each class"):
        MultilabelClassification(Target(**{"name": "y", "dtype": "int64", **wanted}))


def test_other_values_are_refused_before_training():
    with pytest.raises(ConfigError, match=r"has values from 0 to 2; multilabel_classification"):
        MultilabelClassification(target(np.array([[0, 2]]))).check()
    case()[0].check()
