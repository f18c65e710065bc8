"""Tests that metrics equal scikit-learn's, for labels of any shape and as sums over workers."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.evaluation.predictions import measure_predictions
from flotilla.trainer.tasks import metrics
from tests.trainer.objectives import of_classes
from tests.trainer.tasks.measuring import InParts


def predictions(count=400, classes=6, seed=0, lift=1.5):
    """Return labels and logits of a model that is usually right, with many equal logits."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    logits = generator.normal(size=(count, classes)).round(1).astype(np.float32)
    logits[np.arange(count), labels] += lift
    return labels, logits


def measure(labels, logits):
    return measure_predictions(
        of_classes(logits.shape[1]), InParts(labels, logits.astype(np.float32))
    )


def test_metrics_of_each_class_are_scikit_learns():
    labels, logits = predictions()
    found = measure(labels, logits)
    rows, guess = found["per_class"], logits.argmax(axis=1)
    assert found["confusion_matrix"] == scores.confusion_matrix(labels, guess).tolist()
    each = scores.precision_recall_fscore_support(labels, guess)
    for name, values in zip(("precision", "recall", "f1", "support"), each, strict=True):
        assert [row[name] for row in rows] == pytest.approx(values)
    probabilities = np.exp(metrics.log_softmax(logits)).round(9)
    for index, row in enumerate(rows):
        own = labels == index
        area = scores.roc_auc_score(own, probabilities[:, index])
        assert row["auc"] == pytest.approx(area, abs=1e-6)
        area = scores.average_precision_score(own, probabilities[:, index])
        assert row["average_precision"] == pytest.approx(area, abs=1e-6)


def test_a_class_that_does_not_occur_has_zeros_and_leaves_the_average_alone():
    labels, logits = predictions(classes=2)
    found = measure(labels, np.pad(logits, [[0, 0], [0, 3]], constant_values=-9))
    absent = [row for row in found["per_class"] if not row["support"]]
    assert [(row["label"], row["recall"], row["auc"]) for row in absent] == [
        (name, 0, None) for name in "234"
    ]
    expected = scores.recall_score(labels, logits.argmax(axis=1), average="macro")
    assert found["metrics"]["macro_recall"] == pytest.approx(expected)


def test_classes_of_all_or_no_examples_have_no_area_and_no_curve():
    for label in (0, 1):
        assert metrics.roc(np.full(3, label), np.eye(3, 2, dtype=np.float32)) == []
    found = measure(np.zeros(4, int), np.float32([[2, 1, 0]] * 4))
    assert [row["auc"] for row in found["per_class"]] == [None] * 3
    assert found["confusion_matrix"] == [[4, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert found["metrics"]["macro_average_precision"] is None
    assert found["metrics"]["accuracy"] == found["per_class"][0]["f1"] == 1
    assert found["curves"] == []
    low, high = found["intervals"]["accuracy"]
    assert 0 < low < high == 1


def test_of_few_classes_all_are_in_the_top_which_is_no_metric():
    labels, logits = predictions(classes=3, lift=0)
    assert metrics.TOP_NAME not in measure(labels, logits)["metrics"]
    assert metrics.TOP_NAME not in of_classes(3).task.directions


def test_curves_keep_their_ends_and_their_area():
    labels, logits = predictions(count=5000, classes=3)
    for index, curve in enumerate(metrics.curves(labels, logits, list("abc"))):
        roc, pr = np.array(curve["roc"]), np.array(curve["pr"])
        assert len(roc) <= metrics.CURVE_POINTS
        assert roc[0].tolist() == [0, 0]
        assert roc[-1].tolist() == [1, 1]
        assert {pr[0, 0], pr[-1, 0]} == {0, 1}
        area = scores.roc_auc_score(labels == index, metrics.softmax(logits)[:, index])
        assert scores.auc(*roc.T) == pytest.approx(area, abs=0.01)


@pytest.mark.parametrize("classes", [2, 6])
def test_one_curve_is_that_of_the_second_class_or_of_every_class_of_every_example(classes):
    labels, logits = predictions(classes=classes)
    points = metrics.roc(labels, logits)
    found, sure = np.array(points), metrics.softmax(logits)
    assert len(found) <= metrics.CURVE_POINTS
    pair = (labels, sure[:, 1]) if classes == 2 else (np.eye(classes)[labels], sure)
    area = scores.roc_auc_score(*pair, average="micro")
    assert scores.auc(found[:, 0], found[:, 1]) == pytest.approx(area, abs=0.01)
    assert found[[0, -1], :2].tolist() == [[0, 0], [1, 1]]
    # The curve falls from one threshold to the next, and all numbers are finite.
    assert found.min() >= 0
    assert found.max() <= 1
    assert (np.diff(found[:, :2], axis=0) >= 0).all()
    assert (np.diff(found[:, 2]) <= 0).all()
    assert all(type(value) is float for point in points for value in point)


def test_a_thousand_classes_of_which_most_do_not_occur():
    labels, logits = np.array([7, 7, 999]), np.zeros((3, 1000), np.float32)
    logits[:, 7] = 1
    found = measure(labels, logits)
    low, high = found["intervals"]["weighted_recall"]
    assert low < 0.3
    assert high > 0.9
    assert found["metrics"]["weighted_recall"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2)])
def test_macro_f1_is_that_of_classes_that_occur_or_are_predicted(shape):
    random, count = np.random.default_rng(3), 60
    weights = random.uniform(size=count).astype("float32")
    labels = random.integers(-1 if shape else 0, 3, (count, *shape))
    given = random.random((count, *shape, 5)).astype("float32")
    given[..., 4] = 0
    metric = metrics.MacroF1(5)
    for rows in (slice(0, 13), slice(13, None)):
        metric.update_state(labels[rows], given[rows], sample_weight=weights[rows])
    known, each = labels >= 0, np.broadcast_to(weights.reshape(-1, *[1] * len(shape)), labels.shape)
    pair = labels[known], given.argmax(axis=-1)[known]
    expected = scores.f1_score(*pair, sample_weight=each[known], average="macro")
    assert float(metric.result()) == pytest.approx(expected, rel=1e-5)


def test_rows_have_all_numbers_of_an_example():
    values = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(metrics.rows(values), values.reshape(2, 12))
    np.testing.assert_array_equal(metrics.rows(values[:, 0, 0]), [[0], [12]])
