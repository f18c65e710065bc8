"""Metrics agree with scikit-learn's own on the same predictions.

Those over the numbers of an example whatever the shapes; their states are sums: what several
workers measured is added up.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn import metrics as scores

from tests.trainer.objectives import of_classes
from tests.trainer.tasks.measuring import InParts
from trainer.evaluation.predictions import measured
from trainer.tasks import base, metrics

NAMES = list("abcdef")


def test_training_does_not_load_scikit_learn():
    # Keras's own import of it is let go.
    script = (
        "import sys; from trainer import tensorflow_import; tensorflow_import.prepare();"
        "import trainer.tasks.metrics;"
        "print(sorted({'sklearn', 'pandas'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def predictions(count=400, classes=6, seed=0, lift=1.5):
    """Return labels and logits of a model that is right more often than not, with many ties."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, count)
    logits = generator.normal(size=(count, classes)).round(1).astype(np.float32)
    logits[np.arange(count), labels] += lift
    return labels, logits


def normal(logits):
    """Return probabilities that sum to one as exactly as scikit-learn asks."""
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


def measure(labels, logits):
    """Return what an evaluation says of the examples, which it reads in small parts."""
    return measured(of_classes(logits.shape[1]), InParts(labels, logits.astype(np.float32)))


@pytest.fixture(scope="module")
def predicted():
    return predictions()


def test_only_the_ratios_of_weights_count(predicted):
    labels, logits = predicted
    weights = np.random.default_rng(4).uniform(0.5, 2, len(labels)).astype(np.float32)
    large, small = (
        measured(of_classes(logits.shape[1]), InParts(labels, logits, each))["metrics"]
        for each in (weights, weights / 1024)
    )
    names = ("accuracy", *metrics.AVERAGES)
    assert {name: small[name] for name in names} == pytest.approx(
        {name: large[name] for name in names}, rel=1e-5
    )


def test_metrics_are_scikit_learns(predicted):
    labels, logits = predicted
    found = measure(labels, logits)["metrics"]
    assert found["loss"] == pytest.approx(scores.log_loss(labels, normal(logits)), rel=1e-5)
    guess = logits.argmax(axis=1)
    assert found["accuracy"] == pytest.approx(scores.accuracy_score(labels, guess))
    top = scores.top_k_accuracy_score(labels, logits, k=3)
    assert found["top_3_accuracy"] == pytest.approx(top)
    for average in ("macro", "weighted"):
        for name, function in (
            ("precision", scores.precision_score),
            ("recall", scores.recall_score),
            ("f1", scores.f1_score),
        ):
            expected = function(labels, guess, average=average)
            assert found[f"{average}_{name}"] == pytest.approx(expected)


def test_metrics_of_each_class_are_scikit_learns(predicted):
    labels, logits = predicted
    found = measure(labels, logits)
    rows, guess = found["per_class"], logits.argmax(axis=1)
    assert found["confusion_matrix"] == scores.confusion_matrix(labels, guess).tolist()
    each = scores.precision_recall_fscore_support(labels, guess)
    for name, values in zip(("precision", "recall", "f1", "support"), each, strict=True):
        assert [row[name] for row in rows] == pytest.approx(values)
    probabilities = metrics.softmax(logits)
    for index, row in enumerate(rows):
        own = labels == index
        assert row["auc"] == scores.roc_auc_score(own, probabilities[:, index])
        assert row["average_precision"] == scores.average_precision_score(
            own, probabilities[:, index]
        )
    mean = metrics.mean_area(rows, "auc")
    expected = scores.roc_auc_score(labels, normal(logits), multi_class="ovr")
    assert mean == pytest.approx(expected, abs=1e-4)


def test_a_class_that_does_not_occur_has_zeros_and_leaves_the_average_alone():
    labels, logits = predictions(classes=2)
    found = measure(labels, np.pad(logits, [[0, 0], [0, 3]], constant_values=-9))
    absent = [row for row in found["per_class"] if not row["support"]]
    assert [(row["label"], row["recall"], row["auc"]) for row in absent] == [
        (name, 0, None) for name in "234"
    ]
    expected = scores.recall_score(labels, logits.argmax(axis=1), average="macro")
    assert found["metrics"]["macro_recall"] == pytest.approx(expected)


def test_a_class_that_does_not_occur_has_no_area_and_no_curve():
    labels, logits = np.zeros(5, int), np.eye(5, 3, dtype=np.float32)
    rows = measure(labels, logits)["per_class"]
    assert [row["auc"] for row in rows] == [None] * 3
    assert metrics.mean_area(rows, "average_precision") is None
    assert metrics.curves(labels, logits, list("abc")) == []


def test_few_classes_are_all_in_the_top():
    labels, logits = predictions(classes=2, lift=0)
    assert measure(labels, logits)["metrics"]["top_3_accuracy"] == 1.0


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


@pytest.mark.parametrize("label", [0, 1])
def test_of_one_class_there_is_no_curve(label):
    assert metrics.roc(np.full(3, label), np.eye(3, 2, dtype=np.float32)) == []


def calibration(labels, logits):
    found = metrics.CalibrationError("float64")
    found.update_state(*metrics.likeliest(labels, logits))
    return found


def test_calibration_by_hand(predicted):
    labels, logits = predicted
    found = calibration(labels, logits)
    confidence = metrics.softmax(logits).max(axis=1)
    right = logits.argmax(axis=1) == labels
    error = 0.0
    for low in np.arange(15) / 15:
        rows = (confidence > low) & (confidence <= low + 1 / 15)
        if rows.any():
            error += rows.mean() * abs(right[rows].mean() - confidence[rows].mean())
    assert float(found.result()) == pytest.approx(error, abs=1e-6)
    assert sum(each["examples"] for each in found.curve()) == len(labels)


def test_a_model_that_is_always_sure_and_right_is_calibrated():
    logits = np.full((4, 2), -1e9, np.float32)
    logits[:, 1] = 1e9
    assert float(calibration(np.ones(4, int), logits).result()) == 0


def test_an_interval_is_as_wide_as_theory_says(predicted):
    found = measure(*predicted)
    assert set(found["intervals"]) == {*metrics.MEANS, *metrics.AVERAGES}
    for name, (low, high) in found["intervals"].items():
        assert low < found["metrics"][name] < high
    share = found["metrics"]["accuracy"]
    width = 2 * 1.96 * np.sqrt(share * (1 - share) / len(predicted[0]))
    low, high = found["intervals"]["accuracy"]
    assert high - low == pytest.approx(width, rel=0.05)


@pytest.mark.parametrize(("hits", "low", "high"), [(100, 0.963, 1.0), (0, 0.0, 0.037)])
def test_an_interval_of_a_share_has_a_width_at_its_ends(hits, low, high):
    # Newcombe 1998, table I, for other numbers; here scipy's.
    expected = binomtest(hits, 100).proportion_ci(method="wilson")
    assert metrics.wilson(hits / 100, 100) == pytest.approx([*expected])
    assert metrics.wilson(hits / 100, 100) == pytest.approx([low, high], abs=1e-3)


def test_intervals_are_the_same_again_and_in_other_parts(predicted):
    assert measure(*predicted)["intervals"] == measure(*predicted)["intervals"]
    labels, logits = predicted
    turned = measure(labels[::-1], logits[::-1])["intervals"]
    for name, ends in measure(*predicted)["intervals"].items():
        assert turned[name] == pytest.approx(ends)


def test_more_examples_make_an_interval_narrower():
    (low, high), (lower, higher) = (
        metrics_of_means(*predictions(count=count))["loss"] for count in (100, 10_000)
    )
    assert (higher - lower) * 5 < high - low


def metrics_of_means(labels, logits):
    means = metrics.Means()
    means.add(labels, logits, np.ones(len(labels)))
    return means.intervals()


def test_weights_count_as_the_examples_that_they_are_worth():
    labels, logits = predictions(count=200)
    weights = np.where(np.arange(200) < 100, 1.0, 0.0)
    whole, half = metrics.Means(), metrics.Means()
    whole.add(labels, logits, weights)
    half.add(labels[:100], logits[:100], np.ones(100))
    assert whole.examples == pytest.approx(100)
    assert whole.intervals()["accuracy"] == pytest.approx(half.intervals()["accuracy"])


def test_an_area_counts_an_example_as_often_as_it_weighs():
    labels, logits = predictions(count=60, classes=3)
    often = np.random.default_rng(1).integers(0, 4, len(labels))
    repeated = np.repeat(labels, often), np.repeat(logits, often, axis=0)
    for found, expected in zip(
        metrics.exact_areas(labels, logits, often.astype(float)),
        metrics.exact_areas(*repeated),
        strict=True,
    ):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("classes", [2, 6, pytest.param(1000, marks=pytest.mark.slow)])
def test_areas_from_steps_are_close_to_the_exact_ones(classes):
    labels, logits = predictions(count=3000, classes=classes, lift=3)
    areas, probabilities = metrics.Areas.fine(classes), np.exp(metrics.log_softmax(logits))
    for rows in np.array_split(np.arange(len(labels)), 7):
        areas.update_state(labels[rows, np.newaxis] == np.arange(classes), probabilities[rows])
    exact, pairs = metrics.exact_areas(labels, logits), (areas.true.numpy(), areas.false.numpy())
    for found, expected, own, others in zip(areas.of_each(), exact, *pairs, strict=True):
        if expected["auc"] is None:
            assert found == expected
        else:
            # Pairs at one step count half, which is what they may be off by.
            tied = (own * others).sum() / (own.sum() * others.sum())
            assert found["auc"] == pytest.approx(expected["auc"], abs=tied / 2 + 1e-9)
            assert tied < 0.03


def test_many_examples_have_their_areas_from_steps(predicted, monkeypatch):
    exact = measure(*predicted)["metrics"]["macro_auc"]
    monkeypatch.setattr(base.drawn, "__defaults__", (100,))
    found = measure(*predicted)["metrics"]["macro_auc"]
    assert found == pytest.approx(exact, abs=1e-3)
    assert found != exact


def test_a_thousand_classes_of_which_most_do_not_occur():
    labels, logits = np.array([7, 7, 999]), np.zeros((3, 1000), np.float32)
    logits[:, 7] = 1
    found = measure(labels, logits)
    assert found["intervals"]["weighted_recall"] == [0, 1]
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
    "accuracy": (
        lambda: metrics.BinaryAccuracy(name="accuracy"),
        of_labels(scores.accuracy_score),
    ),
    "precision": (metrics.Precision, of_labels(scores.precision_score)),
    "recall": (metrics.Recall, of_labels(scores.recall_score)),
    "micro f1": (lambda: metrics.F1("f1"), of_labels(scores.f1_score)),
    "macro f1": (
        lambda: metrics.F1("f1", average="macro"),
        scores.f1_score(TRUE, GUESSED, sample_weight=WEIGHTS, average="macro"),
    ),
    "log loss": (metrics.BinaryCrossentropy, of_labels(scores.log_loss, SURE)),
    "calibration": (metrics.CalibrationError, expected_calibration()),
    "subset": (
        metrics.SubsetAccuracy,
        scores.accuracy_score(TRUE, GUESSED, sample_weight=WEIGHTS),
    ),
    "absolute": (
        metrics.MeanAbsoluteError,
        of_quantities(scores.mean_absolute_error),
    ),
    "squared": (metrics.MeanSquaredError, of_quantities(scores.mean_squared_error)),
    "root": (
        metrics.RootMeanSquaredError,
        of_quantities(scores.mean_squared_error) ** 0.5,
    ),
    "r2": (lambda: metrics.R2Score(NUMBERS, 1000.5), of_quantities(scores.r2_score)),
}
ARRAYS = {
    name: (QUANTITIES, GUESSES) if name in {"absolute", "squared", "root", "r2"} else (TRUE, SURE)
    for name in CASES
}


def shaped(values, shape):
    return values.reshape(COUNT, *shape)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(NUMBERS,), (2, 2)], ids=["row", "table"])
def test_weights_of_examples_count_for_all_of_their_numbers(name, shape):
    make, expected = CASES[name]
    metric, (true, given) = make(), ARRAYS[name]
    metric.update_state(shaped(true, shape), shaped(given, shape), sample_weight=WEIGHTS)
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


def test_rows_have_all_numbers_of_an_example():
    values = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(metrics.rows(values), values.reshape(2, 12))
    np.testing.assert_array_equal(metrics.rows(values[:, 0, 0]), [[0], [12]])
