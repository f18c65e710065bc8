"""Tests how outputs of a program's model are interpreted as logits or numbers."""

import numpy as np
import pytest

from flotilla.trainer.evaluation.program_model.outputs import match_outputs
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.binary_classification import BinaryClassification
from flotilla.trainer.tasks.classification import Classification
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.multilabel_classification import MultilabelClassification
from flotilla.trainer.tasks.regression import Regression

CLASSES = Target(name="kind", shape=(), dtype="int64", num_classes=3)
TWO = Target(name="left", shape=(), dtype="int64", num_classes=2)
PRICE = Target(
    name="price", shape=(), dtype="float32", moments={"mean": 10.0, "std": 4.0, "min": 0, "max": 20}
)
SHARES = np.float32([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])


def taken(task, answers, said="auto", swapped=frozenset()):
    found = match_outputs(task, answers, said, swapped)
    return {
        name: (each.taken, np.asarray(each.convert(answers[each.name])))
        for name, each in found.items()
    }


def test_rows_that_sum_to_1_are_probabilities_and_others_are_logits():
    kind, logits = taken(Classification(CLASSES), {"y": SHARES})[""]
    assert kind == "probabilities"
    np.testing.assert_allclose(np.exp(logits), SHARES, rtol=1e-6)
    kind, logits = taken(Classification(CLASSES), {"y": SHARES * 2})[""]
    assert kind == "logits"
    np.testing.assert_array_equal(logits, SHARES * 2)
    assert taken(Classification(CLASSES), {"y": SHARES}, "logits")[""][0] == "logits"


def test_certainty_stays_finite():
    sure = np.float32([[1, 0, 0], [0, 1, 0]])
    assert np.isfinite(taken(Classification(CLASSES), {"y": sure})[""][1]).all()
    assert np.isfinite(taken(BinaryClassification(TWO), {"y": np.float32([0, 1])})[""][1]).all()


SURE = np.float32([0.25, 0.75])
BOTH = np.stack([1 - SURE, SURE], axis=1)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"y": SURE}, "probabilities"),
        ({"y": SURE[:, np.newaxis]}, "probabilities"),
        ({"y": BOTH}, "probabilities"),
        ({"y": np.log(BOTH) + 3}, "logits"),
        ({"logit": np.log(SURE / (1 - SURE)), "probability": 0 * SURE}, "logits"),
    ],
)
def test_two_classes_in_every_form(answers, expected):
    kind, logits = taken(BinaryClassification(TWO), answers)[""]
    assert kind == expected
    np.testing.assert_allclose(logits, [[-np.log(3)], [np.log(3)]], rtol=1e-6)
    # If the positive class is class 0 in the records, the program's probability is for the other
    # class.
    _, other = taken(BinaryClassification(TWO), answers, swapped=frozenset(["left"]))[""]
    np.testing.assert_array_equal(other, -logits)


def test_the_named_answer_of_the_task_is_taken_among_several():
    values = {"classes": np.int64([1, 0]), "probabilities": SHARES, "logits": np.log(SHARES)}
    assert taken(Classification(CLASSES), values)[""][0] == "logits"
    assert taken(Classification(CLASSES), values, "probabilities")[""][0] == "probabilities"


def test_numbers_are_in_units_of_the_label():
    prices = np.float32([6, 14])
    assert taken(Regression(PRICE), {"y": prices})[""][0] == "numbers"
    np.testing.assert_array_equal(taken(Regression(PRICE), {"y": prices})[""][1], [[6], [14]])
    scaled = taken(Regression(PRICE, standardize=True), {"y": prices})[""][1]
    np.testing.assert_array_equal(scaled, [[-1], [1]])


def test_several_targets_by_their_names():
    task = MultiOutput({"kind": Classification(CLASSES), "price": Regression(PRICE)}, {})
    values = {"kind_probabilities": SHARES, "price": np.float32([6, 14])}
    found = taken(task, values)
    assert {name: kind for name, (kind, _) in found.items()} == {
        "kind": "probabilities",
        "price": "numbers",
    }
    with pytest.raises(UserError, match="no output for 'price'; name each output of the signature"):
        taken(task, {"kind": SHARES, "cost": np.float32([6, 14])})


def test_several_labels_at_once():
    labels = Target(name="tags", shape=(3,), dtype="int64", num_classes=0)
    kind, _ = taken(MultilabelClassification(labels), {"y": SHARES * 1.2})[""]
    assert kind == "probabilities", "they need not sum to 1"
