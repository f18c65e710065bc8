"""Tests that metrics equal scikit-learn's, for labels of any shape and as sums over workers."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.evaluation.predictions import measure_predictions
from flotilla.trainer.tasks import metrics
from tests.trainer.objectives import of_classes
from tests.trainer.tasks.measuring import InParts

NAMES = list("abcdef")


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


@pytest.fixture(scope="module")
def predicted():
    return predictions()


def test_metrics_of_each_class_are_scikit_learns(predicted):
    labels, logits = predicted
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
    labels, logits = np.zeros(5, int), np.eye(5, 3, dtype=np.float32)
    rows = measure(labels, logits)["per_class"]
    assert [row["auc"] for row in rows] == [None] * 3
    assert measure(labels, logits)["metrics"]["macro_average_precision"] is None
    assert metrics.curves(labels, logits, list("abc")) == []


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


def test_one_curve_of_two_classes_is_that_of_the_second():
    labels, logits = predictions(classes=2)
    found = np.array(metrics.roc(labels, logits))
    area = scores.roc_auc_score(labels, metrics.softmax(logits)[:, 1])
    assert scores.auc(found[:, 0], found[:, 1]) == pytest.approx(area, abs=0.01)


def test_one_curve_of_many_classes_asks_for_every_class_of_every_example(predicted):
    labels, logits = predicted
    found = np.array(metrics.roc(labels, logits))
    assert len(found) <= metrics.CURVE_POINTS
    every = np.eye(len(NAMES))[labels]
    area = scores.roc_auc_score(every, metrics.softmax(logits), average="micro")
    assert scores.auc(found[:, 0], found[:, 1]) == pytest.approx(area, abs=0.01)
    assert found[0].tolist()[:2] == [0, 0]
    assert found[-1].tolist()[:2] == [1, 1]


@pytest.mark.parametrize("classes", [2, 6])
def test_a_curve_falls_from_one_threshold_to_the_next_and_is_finite(classes):
    labels, logits = predictions(classes=classes)
    found = np.array(metrics.roc(labels, logits))
    assert np.isfinite(found).all()
    assert found.min() >= 0
    assert found.max() <= 1
    assert (np.diff(found[:, :2], axis=0) >= 0).all()
    assert (np.diff(found[:, 2]) <= 0).all()
    assert all(type(value) is float for point in metrics.roc(labels, logits) for value in point)


def test_a_thousand_classes_of_which_most_do_not_occur():
    labels, logits = np.array([7, 7, 999]), np.zeros((3, 1000), np.float32)
    logits[:, 7] = 1
    found = measure(labels, logits)
    low, high = found["intervals"]["weighted_recall"]
    assert low < 0.3
    assert high > 0.9
    assert found["metrics"]["weighted_recall"] == pytest.approx(2 / 3)


def test_one_class_alone_has_no_areas_and_no_warnings():
    found = measure(np.zeros(4, int), np.ones((4, 2), np.float32) * [2, 1])
    assert found["confusion_matrix"] == [[4, 0], [0, 0]]
    assert found["metrics"]["accuracy"] == 1
    first, _ = found["per_class"]
    assert (first["auc"], first["f1"]) == (None, 1)
    assert found["curves"] == []
    low, high = found["intervals"]["accuracy"]
    assert 0 < low < high == 1


COUNT, NUMBERS = 60, 4
RANDOM = np.random.default_rng(3)
TRUE = RANDOM.integers(2, size=(COUNT, NUMBERS))
SURE = np.clip(0.3 * TRUE + 0.7 * RANDOM.uniform(size=TRUE.shape), 0, 1).astype("float32")
QUANTITIES = (1000 + RANDOM.normal(size=TRUE.shape)).astype("float32")
GUESSES = (QUANTITIES + RANDOM.normal(size=TRUE.shape) / 2).astype("float32")
WEIGHTS = RANDOM.uniform(size=COUNT).astype("float32")
REPEATED = np.repeat(WEIGHTS, NUMBERS)
GUESSED = SURE > 0.5


def of_labels(score, guesses=GUESSED, **args):
    return score(TRUE.ravel(), guesses.ravel(), sample_weight=REPEATED, **args)


def of_quantities(score):
    return score(QUANTITIES, GUESSES, sample_weight=WEIGHTS)


def expected_calibration():
    place = np.minimum((SURE.ravel() * 15).astype(int), 14)
    away = [((SURE - TRUE).ravel() * REPEATED)[place == each].sum() for each in range(15)]
    return np.abs(away).sum() / REPEATED.sum()


CASES = {
    "accuracy": (lambda: metrics.BinaryAccuracy(name="accuracy"), of_labels(scores.accuracy_score)),
    "precision": (metrics.Precision, of_labels(scores.precision_score)),
    "recall": (metrics.Recall, of_labels(scores.recall_score)),
    "micro f1": (lambda: metrics.F1("f1"), of_labels(scores.f1_score)),
    "macro f1": (
        lambda: metrics.F1("f1", average="macro"),
        scores.f1_score(TRUE, GUESSED, sample_weight=WEIGHTS, average="macro"),
    ),
    "log loss": (metrics.BinaryCrossentropy, of_labels(scores.log_loss, SURE)),
    "calibration": (metrics.CalibrationError, expected_calibration()),
    "subset": (metrics.SubsetAccuracy, scores.accuracy_score(TRUE, GUESSED, sample_weight=WEIGHTS)),
    "absolute": (metrics.MeanAbsoluteError, of_quantities(scores.mean_absolute_error)),
    "squared": (metrics.MeanSquaredError, of_quantities(scores.mean_squared_error)),
    "root": (metrics.RootMeanSquaredError, of_quantities(scores.mean_squared_error) ** 0.5),
    "r2": (lambda: metrics.R2Score(NUMBERS, 1000.5), of_quantities(scores.r2_score)),
}
ARRAYS = {
    name: (QUANTITIES, GUESSES) if name in {"absolute", "squared", "root", "r2"} else (TRUE, SURE)
    for name in CASES
}


@pytest.mark.parametrize("name", CASES)
def test_weights_of_examples_count_for_all_of_their_numbers(name):
    make, expected = CASES[name]
    metric, arrays = make(), ARRAYS[name]
    metric.update_state(*(each.reshape(COUNT, 2, 2) for each in arrays), sample_weight=WEIGHTS)
    assert float(metric.result()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", [*CASES, "areas"])
def test_states_of_two_workers_add_up(name):
    make = CASES[name][0] if name in CASES else (lambda: metrics.Areas(NUMBERS))
    true, given = ARRAYS.get(name, (TRUE, SURE))
    whole, *parts = make(), make(), make()
    whole.update_state(true, given, sample_weight=WEIGHTS)
    for part, rows in zip(parts, (slice(0, 13), slice(13, None)), strict=True):
        part.update_state(true[rows], given[rows], sample_weight=WEIGHTS[rows])
    states = ([np.asarray(each) for each in part.variables] for part in parts)
    added = [sum(pair) for pair in zip(*states, strict=True)]
    found, expected = (
        {"": value} if not isinstance(value, dict) else value
        for value in (whole.stateless_result(added), whole.result())
    )
    for key, value in expected.items():
        assert float(found[key]) == pytest.approx(float(value), rel=1e-4)


def test_areas_are_means_over_the_numbers():
    metric = metrics.Areas(NUMBERS)
    metric.update_state(TRUE, SURE, sample_weight=WEIGHTS)
    found = metric.result()
    both = ("auc", scores.roc_auc_score), ("average_precision", scores.average_precision_score)
    for name, score in both:
        expected = score(TRUE, SURE, sample_weight=WEIGHTS)
        assert float(found[name]) == pytest.approx(expected, abs=0.01), name


@pytest.mark.slow
def test_areas_of_one_kind_of_labels_are_not_a_number():
    metric = metrics.Areas()
    metric.update_state(np.ones((5, 1)), np.full((5, 1), 0.7, "float32"))
    assert all(np.isnan(float(value)) for value in metric.result().values())


@pytest.mark.parametrize("shape", [(), (NUMBERS,), (2, 2)])
def test_macro_f1_is_that_of_classes_that_occur_or_are_predicted(shape):
    labels = RANDOM.integers(-1, 3, (COUNT, *shape)) if shape else RANDOM.integers(0, 3, COUNT)
    given = RANDOM.random((COUNT, *shape, 5)).astype("float32")
    given[..., 4] = 0
    metric = metrics.MacroF1(5)
    for rows in (slice(0, 13), slice(13, None)):
        metric.update_state(labels[rows], given[rows], sample_weight=WEIGHTS[rows])
    known, each = labels >= 0, np.broadcast_to(WEIGHTS.reshape(-1, *[1] * len(shape)), labels.shape)
    pair = labels[known], given.argmax(axis=-1)[known]
    expected = scores.f1_score(*pair, sample_weight=each[known], average="macro")
    assert float(metric.result()) == pytest.approx(expected, rel=1e-5)


def test_rows_have_all_numbers_of_an_example():
    values = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(metrics.rows(values), values.reshape(2, 12))
    np.testing.assert_array_equal(metrics.rows(values[:, 0, 0]), [[0], [12]])
