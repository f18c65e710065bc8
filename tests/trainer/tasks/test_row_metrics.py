"""Metrics over the numbers of an example agree with scikit-learn, whatever the shapes.

Their states are sums: what several workers measured is added up.
"""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as scores

from trainer.tasks import row_metrics

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


def calibration():
    place = np.minimum((SURE.ravel() * 15).astype(int), 14)
    away = [((SURE - TRUE).ravel() * REPEATED)[place == each].sum() for each in range(15)]
    return np.abs(away).sum() / REPEATED.sum()


CASES = {
    "accuracy": (
        lambda: row_metrics.BinaryAccuracy(name="accuracy"),
        of_labels(scores.accuracy_score),
    ),
    "precision": (row_metrics.Precision, of_labels(scores.precision_score)),
    "recall": (row_metrics.Recall, of_labels(scores.recall_score)),
    "micro f1": (lambda: row_metrics.F1("f1"), of_labels(scores.f1_score)),
    "macro f1": (
        lambda: row_metrics.F1("f1", average="macro"),
        scores.f1_score(TRUE, GUESSED, sample_weight=WEIGHTS, average="macro"),
    ),
    "log loss": (row_metrics.BinaryCrossentropy, of_labels(scores.log_loss, SURE)),
    "calibration": (row_metrics.CalibrationError, calibration()),
    "subset": (
        row_metrics.SubsetAccuracy,
        scores.accuracy_score(TRUE, GUESSED, sample_weight=WEIGHTS),
    ),
    "absolute": (
        row_metrics.MeanAbsoluteError,
        of_quantities(scores.mean_absolute_error),
    ),
    "squared": (row_metrics.MeanSquaredError, of_quantities(scores.mean_squared_error)),
    "root": (
        row_metrics.RootMeanSquaredError,
        of_quantities(scores.mean_squared_error) ** 0.5,
    ),
    "r2": (lambda: row_metrics.R2Score(NUMBERS, 1000.5), of_quantities(scores.r2_score)),
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
    make = CASES[name][0] if name in CASES else (lambda: row_metrics.Areas(NUMBERS))
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
    metric = row_metrics.Areas(NUMBERS)
    metric.update_state(TRUE, SURE, sample_weight=WEIGHTS)
    found = metric.result()
    for name, score in (("auc", scores.roc_auc_score), ("pr_auc", scores.average_precision_score)):
        expected = score(TRUE, SURE, sample_weight=WEIGHTS)
        assert float(found[name]) == pytest.approx(expected, abs=0.01), name


@pytest.mark.slow
def test_areas_of_one_kind_of_labels_are_not_a_number():
    metric = row_metrics.Areas()
    metric.update_state(np.ones((5, 1)), np.full((5, 1), 0.7, "float32"))
    assert all(np.isnan(float(value)) for value in metric.result().values())


def test_rows_have_all_numbers_of_an_example():
    values = np.arange(24).reshape(2, 3, 4)
    np.testing.assert_array_equal(row_metrics.rows(values), values.reshape(2, 12))
    np.testing.assert_array_equal(row_metrics.rows(values[:, 0, 0]), [[0], [12]])
