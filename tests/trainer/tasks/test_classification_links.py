"""Tests that binary and multi-label metrics equal those of Keras and scikit-learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
    Sigmoid,
    Softmax,
)
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import InParts, check_validation, evaluated, measured, target

COUNT, CLASSES = 56, 4
NAMES = ("a", "b", "c", "d")


def one(dtype="int64", names=(), rare=0.0):
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, COUNT)
    outputs = (random.normal(size=(COUNT, 1)) + 1.5 * labels[:, np.newaxis]).astype("float32")
    wanted = target(labels.astype(dtype), num_classes=len(names), labels=names)
    return BinaryClassification(wanted), labels.astype(dtype), outputs - np.float32(rare)


def several(dtype="int64", empty=False):
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (COUNT, CLASSES))
    if empty:
        labels[:, 1] = 0
    outputs = (random.normal(size=(COUNT, CLASSES)) + 1.5 * labels).astype("float32")
    task = MultilabelClassification(target(labels.astype(dtype)), labels=NAMES)
    return task, labels.astype(dtype), outputs


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((one, dtype) for dtype in ("int64", "bool", "uint8")),
        *((several, dtype) for dtype in ("int64", "bool", "float32")),
    ],
)
def test_a_validation_finds_what_an_evaluation_finds(case, dtype, weighted):
    check_validation(*case(dtype), weighted=weighted)


def test_small_probabilities_are_distinguished():
    task, labels, outputs = one(rare=9.0)
    found = measured(task, InParts(labels, outputs))
    assert found["auc"] == pytest.approx(scores.roc_auc_score(labels, outputs[:, 0]), abs=0.01)


@pytest.mark.parametrize("case", [one, several])
def test_areas_of_one_kind_of_labels_are_left_out(case):
    task, labels, outputs = case()
    found = measured(task, InParts(np.zeros_like(labels), outputs))
    assert set(found) == {
        each for each in task.directions if not each.endswith(("auc", "average_precision"))
    }


def test_a_class_without_examples_has_no_part_in_the_mean_area():
    task, labels, outputs = several(empty=True)
    found = measured(task, InParts(labels, outputs))
    able = [0, 2, 3]
    area = scores.roc_auc_score(labels[:, able], outputs[:, able], average="macro")
    assert found["macro_auc"] == pytest.approx(area, abs=0.01)
    rows = evaluated(task, InParts(labels, outputs))["per_class"]
    assert [row["label"] for row in rows if row["auc"] is None] == ["b"]


def test_what_is_said_of_one_besides_the_metrics_is_plain_data():
    task, labels, outputs = one(names=("no_click", "click"))
    details = evaluated(task, InParts(labels, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    matrix = scores.confusion_matrix(labels, outputs[:, 0] > 0)
    assert details["confusion_matrix"] == matrix.tolist()
    assert [curve["label"] for curve in details["curves"]] == ["click"]
    assert details["roc"][0][:2] == [0, 0]
    row = task.described(labels[0], outputs[0])
    assert row["label"] == ("no_click", "click")[labels[0]]
    assert row["probability"] == pytest.approx(np.exp(-task.example_losses(labels, outputs)[0]))


def test_what_is_said_of_several_besides_the_metrics_is_plain_data():
    task, labels, outputs = several()
    details = evaluated(task, InParts(labels, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    each = scores.precision_recall_fscore_support(labels, outputs > 0)
    for name, values in zip(("precision", "recall", "f1", "support"), each, strict=True):
        assert [row[name] for row in details["per_class"]] == pytest.approx(values)
    assert [curve["label"] for curve in details["curves"]] == list(NAMES)
    described = task.described(np.array([0, 1, 0, 1]), np.array([-1.0, -1.0, -1.0, -1.0]))
    assert described == {"label": "b, d", "predicted": "none"}


def softmax_of(kind, places=()):
    wanted = Target(name="y", shape=places, dtype="int64", num_classes=CLASSES)
    random = np.random.default_rng(0)
    return kind(wanted), None, random.normal(size=(COUNT, *places, CLASSES)).astype("float32")


@pytest.mark.parametrize(
    ("case", "link", "names", "shape"),
    [
        (one, Sigmoid, ("logit", "probability"), ()),
        (several, Sigmoid, ("logits", "probabilities"), (CLASSES,)),
        (lambda: softmax_of(Classification), Softmax, ("logits", "probabilities"), (CLASSES,)),
        (
            lambda: softmax_of(SequenceLabelling, (5,)),
            Softmax,
            ("logits", "probabilities"),
            (5, CLASSES),
        ),
    ],
)
def test_answers_give_the_outputs_back(case, link, names, shape):
    task, _, outputs = case()
    assert isinstance(task, link)
    answers = task.answers(outputs)
    assert {name: each.shape[1:] for name, each in answers.items()} == dict.fromkeys(names, shape)
    np.testing.assert_array_equal(task.outputs_of(answers), outputs)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"train": [3, 4], "test": [2, 0]}, "the split 'test' has no example whose 'y' is 'yes'"),
        ({"train": [0, 4]}, "the split 'train' has no example whose 'y' is 'no'"),
        ({"train": [3]}, "the split 'train' has no example whose 'y' is 'yes'"),
        ({"train": [1, 1, 1]}, "the label 'y' has 3 classes in the dataset"),
    ],
)
def test_a_split_with_one_of_both_is_refused_before_training(counts, words):
    found = Target(name="y", shape=(), dtype="int64", labels=("no", "yes"), counts=counts)
    with pytest.raises(ConfigError, match=words):
        BinaryClassification(found).check()


ONE = "the label must be true or false, 0 or 1, or one of two classes"
ROW = "the label must be a vector of 0 or 1 for each class"


@pytest.mark.parametrize(
    ("kind", "wanted", "words"),
    [
        (BinaryClassification, {"dtype": "float32"}, ONE),
        (BinaryClassification, {"num_classes": 3}, ONE),
        (BinaryClassification, {"shape": (2,)}, ONE),
        (MultilabelClassification, {"dtype": "string", "shape": (2,)}, ROW),
        (MultilabelClassification, {"shape": ()}, ROW),
        (MultilabelClassification, {"shape": (2, 2)}, ROW),
    ],
)
def test_another_label_is_refused(kind, wanted, words):
    with pytest.raises(ConfigError, match=words):
        kind(Target(**{"name": "y", "shape": (), "dtype": "int64", **wanted}))


def test_other_values_are_refused_before_training():
    with pytest.raises(ConfigError, match=r"has values from 0 to 2, but multilabel_classification"):
        MultilabelClassification(target(np.array([[0, 2]]))).check()
    several()[0].check()
