"""Yes and no are measured as Keras and scikit-learn do."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn import metrics as scores

from tests.trainer.tasks.measuring import InParts, measured, target
from trainer.errors import ConfigError
from trainer.tasks.base import Target
from trainer.tasks.binary_classification import BinaryClassification

COUNT = 60


def case(dtype="int64", names=(), rare=0.0):
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, COUNT)
    outputs = (random.normal(size=(COUNT, 1)) + 1.5 * labels[:, np.newaxis]).astype("float32")
    wanted = target(labels.astype(dtype), num_classes=len(names), labels=names)
    return BinaryClassification(wanted), labels.astype(dtype), outputs - np.float32(rare)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int64", "bool", "uint8"])
@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_those_of_scikit_learn(dtype, weighted):
    task, labels, outputs = case(dtype)
    weights = np.random.default_rng(2).uniform(size=COUNT).astype("float32") if weighted else None
    found = measured(task, InParts(labels, outputs, weights))
    sure, guess = 1 / (1 + np.exp(-outputs[:, 0].astype("float64"))), outputs[:, 0] > 0
    of = {"sample_weight": weights}
    entropy = scores.log_loss(labels, sure, **of)
    expected = {
        "accuracy": scores.accuracy_score(labels, guess, **of),
        "precision": scores.precision_score(labels, guess, **of),
        "recall": scores.recall_score(labels, guess, **of),
        "f1": scores.f1_score(labels, guess, **of),
        "log_loss": entropy,
        "brier_score": scores.brier_score_loss(labels, sure, **of),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert found["auc"] == pytest.approx(scores.roc_auc_score(labels, sure, **of), abs=0.01)
    precise = scores.average_precision_score(labels, sure, **of)
    assert found["pr_auc"] == pytest.approx(precise, abs=0.01)
    assert 0 < found["calibration_error"] < 0.5
    assert set(found) == set(task.directions)
    if not weighted:
        assert found["loss"] == pytest.approx(entropy, rel=1e-4)
        assert task.example_losses(labels, outputs).mean() == pytest.approx(entropy, rel=1e-4)


def test_small_probabilities_are_distinguished():
    task, labels, outputs = case(rare=9.0)
    found = measured(task, InParts(labels, outputs))
    assert found["auc"] == pytest.approx(scores.roc_auc_score(labels, outputs[:, 0]), abs=0.01)


def test_areas_of_one_kind_of_labels_are_left_out():
    task, labels, outputs = case()
    found = measured(task, InParts(np.zeros_like(labels), outputs))
    assert set(found) == set(task.directions) - {"auc", "pr_auc"}


def test_what_is_said_besides_the_metrics_is_plain_data():
    task, labels, outputs = case(names=("no_click", "click"))
    details = task.details(InParts(labels, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    assert (
        details["confusion_matrix"] == scores.confusion_matrix(labels, outputs[:, 0] > 0).tolist()
    )
    (curve,) = details["curves"]
    assert curve["label"] == "click"
    assert details["roc"][0][:2] == [0, 0]
    row = task.described(labels[0], outputs[0])
    assert row["label"] == ("no_click", "click")[labels[0]]
    assert row["probability"] == pytest.approx(np.exp(-task.example_losses(labels, outputs)[0]))


def test_answers_give_the_outputs_back():
    task, _, outputs = case()
    answers = task.answers(outputs)
    assert {name: each.shape for name, each in answers.items()} == {
        "logit": (COUNT,),
        "probability": (COUNT,),
    }
    np.testing.assert_array_equal(task.outputs_of(answers), outputs)


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"train": [3, 4], "test": [2, 0]}, "the split 'test' has no example whose 'y' is 'yes'"),
        ({"train": [0, 4]}, "the split 'train' has no example whose 'y' is 'no'"),
        ({"train": [3]}, "the split 'train' has no example whose 'y' is 'yes'"),
        ({"train": [1, 1, 1]}, "the label 'y' has 3 values in the dataset"),
    ],
)
def test_a_split_with_one_of_both_is_refused_before_training(counts, words):
    found = Target(name="y", shape=(), dtype="int64", labels=("no", "yes"), counts=counts)
    with pytest.raises(ConfigError, match=words):
        BinaryClassification(found).check()


@pytest.mark.parametrize("wanted", [{"dtype": "float32"}, {"num_classes": 3}, {"shape": (2,)}])
def test_a_label_of_more_values_is_refused(wanted):
    facts = {"name": "y", "shape": (), "dtype": "int64", **wanted}
    with pytest.raises(ConfigError, match="it takes true or false, 0 or 1, or one of two classes"):
        BinaryClassification(Target(**facts))
