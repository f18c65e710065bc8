"""Tests that binary and multi-label metrics equal those of Keras and scikit-learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.binary_classification import BinaryClassification
from flotilla.trainer.tasks.classification import Classification, Sigmoid, Softmax
from flotilla.trainer.tasks.multilabel_classification import MultilabelClassification
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import InParts, evaluated, measured, target

COUNT, CLASSES = 60, 4
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


def of_one(labels, outputs, of):
    sure, guess = 1 / (1 + np.exp(-outputs[:, 0].astype("float64"))), outputs[:, 0] > 0
    return {
        "accuracy": scores.accuracy_score(labels, guess, **of),
        "precision": scores.precision_score(labels, guess, **of),
        "recall": scores.recall_score(labels, guess, **of),
        "f1": scores.f1_score(labels, guess, **of),
        "log_loss": scores.log_loss(labels, sure, **of),
        "brier_score": scores.brier_score_loss(labels, sure, **of),
    }


def of_several(labels, outputs, of):
    guess = outputs > 0
    right = (labels == guess).mean(axis=1)
    return {
        "binary_accuracy": np.average(right, weights=of["sample_weight"]),
        "subset_accuracy": scores.accuracy_score(labels, guess, **of),
        "micro_precision": scores.precision_score(labels, guess, average="micro", **of),
        "micro_recall": scores.recall_score(labels, guess, average="micro", **of),
        "micro_f1": scores.f1_score(labels, guess, average="micro", **of),
        "macro_f1": scores.f1_score(labels, guess, average="macro", **of),
    }


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("case", "dtype", "expected_of"),
    [
        *((one, dtype, of_one) for dtype in ("int64", "bool", "uint8")),
        *((several, dtype, of_several) for dtype in ("int64", "bool", "float32")),
    ],
)
def test_metrics_are_those_of_scikit_learn(case, dtype, expected_of, weighted):
    task, labels, outputs = case(dtype)
    weights = np.random.default_rng(2).uniform(size=COUNT).astype("float32") if weighted else None
    found = measured(task, InParts(labels, outputs, weights))
    of = {"sample_weight": weights}
    true = labels.astype(int)
    expected = expected_of(true, outputs, of)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    area = scores.roc_auc_score(true, outputs, average="macro", **of)
    begin = "macro_" if case is several else ""
    assert found[f"{begin}auc"] == pytest.approx(area, abs=0.01)
    precise = scores.average_precision_score(true, outputs, average="macro", **of)
    assert found[f"{begin}average_precision"] == pytest.approx(precise, abs=0.01)
    assert 0 < found["calibration_error"] < 0.5
    assert set(found) == set(task.directions)
    if not weighted:
        mean = task.example_losses(labels, outputs).mean()
        assert found["loss"] == pytest.approx(mean, rel=1e-4)
        assert found.get("log_loss", mean) == pytest.approx(mean, rel=1e-4)


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
    (curve,) = details["curves"]
    assert curve["label"] == "click"
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


def softmax_of(kind, shape, places=()):
    wanted = Target(name="y", shape=shape, dtype="int64", num_classes=CLASSES)
    random = np.random.default_rng(0)
    return kind(wanted), None, random.normal(size=(COUNT, *places, CLASSES)).astype("float32")


@pytest.mark.parametrize(
    ("case", "link", "columns"),
    [
        (one, Sigmoid, {"logit": (), "probability": ()}),
        (several, Sigmoid, {"logits": (CLASSES,), "probabilities": (CLASSES,)}),
        (
            lambda: softmax_of(Classification, ()),
            Softmax,
            {"logits": (CLASSES,), "probabilities": (CLASSES,)},
        ),
        (
            lambda: softmax_of(SequenceLabelling, (5,), (5,)),
            Softmax,
            {"logits": (5, CLASSES), "probabilities": (5, CLASSES)},
        ),
    ],
)
def test_answers_give_the_outputs_back(case, link, columns):
    task, _, outputs = case()
    assert isinstance(task, link)
    answers = task.answers(outputs)
    assert {name: each.shape[1:] for name, each in answers.items()} == columns
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
