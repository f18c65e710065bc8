"""Tests that intervals stay in range and cover the true value, and the sums behind them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from flotilla.trainer.tasks import intervals
from flotilla.trainer.tasks.areas import Scores
from flotilla.trainer.tasks.intervals import Calibration, Groups, Moments
from flotilla.trainer.tasks.tallies import intervals_of_averages

SHARES = st.floats(0, 1)
ERRORS = st.floats(0, 10)
COUNTS = st.floats(0, 1e7)


@pytest.mark.parametrize(("hits", "count"), [(100, 100), (0, 100), (37, 50)])
def test_one_of_a_share_is_scipys(hits, count):
    expected = binomtest(hits, count).proportion_ci(method="wilson")
    assert intervals.share_interval(hits / count, count) == pytest.approx([*expected])


def test_of_no_examples_a_share_is_anything():
    assert intervals.share_interval(0.0, 0) == [0, 1]
    assert intervals.metric_interval(1.0, 0.0, 1) == [0, 1]
    assert intervals.above_zero(1.0, 0.0, 1) is None


@given(SHARES, ERRORS, COUNTS)
def test_no_end_leaves_the_range(value, error, count):
    for low, high in (
        intervals.metric_interval(value, error, count),
        intervals.share_interval(value, count),
    ):
        assert 0 <= low <= value + 1e-12
        assert value - 1e-12 <= high <= 1
    if ends := intervals.above_zero(3 * value, error, count):
        assert 0 <= ends[0] <= 3 * value <= ends[1] < np.inf
    if ends := intervals.below_one(1 - 3 * value, error, count):
        assert -np.inf < ends[0] <= 1 - 3 * value + 1e-9
        assert 1 - 3 * value - 1e-9 <= ends[1] <= 1


def test_what_was_not_seen_may_still_be_there():
    assert intervals.metric_interval(1.0, 0.0, 100) == pytest.approx(
        intervals.share_interval(1.0, 100)
    )
    assert intervals.above_zero(0.1, 0.0, 100, unseen=5.0)[1] > 0.2


def covered(draw, truth, times=400):
    generator = np.random.default_rng(0)
    found = [draw(generator) for _ in range(times)]
    return np.mean([low <= truth <= high for low, high in found])


# True values of the metrics, estimated from a million examples.
AREAS = {"auc": 0.8555, "average_precision": 0.4776}


@pytest.mark.parametrize("name", AREAS)
def test_one_of_an_area_covers_it_also_with_few_true_examples(name):
    def draw(generator):
        labels = generator.random((360, 1)) < 0.1
        scores = Scores()
        scores.add(labels, generator.normal(size=(360, 1)) + 1.5 * labels, np.ones(360))
        return scores.result().intervals()[name]

    assert 0.925 < covered(draw, AREAS[name]) <= 1


def test_one_of_a_mean_over_classes_covers_it():
    shares, right = np.array([0.6, 0.3, 0.1]), 0.8

    def draw(generator, count=360):
        labels = generator.choice(3, count, p=shares)
        wrong = (labels + generator.integers(1, 3, count)) % 3
        guess = np.where(generator.random(count) < right, labels, wrong)
        hits = np.bincount(labels[labels == guess], minlength=3)
        counts = np.stack([hits, np.bincount(labels, minlength=3), np.bincount(guess, minlength=3)])
        return intervals_of_averages(np.stack([counts, counts]).astype(float))["macro_f1"]

    taken = right * shares + (1 - right) / 2 * (1 - shares)
    truth = (2 * right * shares / (shares + taken)).mean()
    assert 0.925 < covered(draw, truth) < 0.99


def test_weights_count_as_the_examples_that_they_are_worth():
    assert intervals.kish(10.0, 10.0) == 10
    assert intervals.kish(np.array([30.0, 0.0]), np.array([90.0, 0.0])).tolist() == [10, 0]


RANDOM = np.random.default_rng(2)


def test_means_are_exact_far_from_zero_and_in_any_parts():
    values, weights = 1e8 + RANDOM.normal(size=(2, 500)), RANDOM.random(500)
    moments = Moments()
    for rows in np.array_split(np.arange(500), 7):
        moments.add(values[:, rows], weights[rows])
    means, errors = moments.result()
    assert means == pytest.approx(np.average(values, axis=1, weights=weights), abs=1e-6)
    away = values - np.array(means)[:, np.newaxis]
    count = weights.sum() ** 2 / (weights**2).sum()
    expected = np.sqrt((weights**2 * away**2).sum(axis=1) * count / (count - 1)) / weights.sum()
    assert errors == pytest.approx(expected, rel=1e-6)
    assert moments.count == pytest.approx(count)


@pytest.mark.parametrize("count", [50, 2000])
def test_the_error_of_a_ratio_of_sums_is_that_of_its_linear_part(count):
    x, y = RANDOM.random(count) + 1, RANDOM.random(count)
    groups = Groups(3)
    for rows in np.array_split(np.arange(count), 9):
        groups.add(np.stack([np.ones(len(rows)), x[rows], y[rows]], axis=1))
    ratio = y.sum() / x.sum()
    (error,) = groups.errors(lambda sums: sums[..., 2:] / sums[..., 1:2])
    expected = np.sqrt(((y - ratio * x) ** 2).sum()) / x.sum()
    assert groups.total == pytest.approx([count, x.sum(), y.sum()])
    # The estimate from a hundred groups has a relative error of about 10 %.
    assert error == pytest.approx(expected, rel=0.25)


def calibration(true, sure, weights=None):
    found = Calibration()
    found.add(true, sure, np.ones(len(sure)) if weights is None else weights)
    return found


def test_a_bin_has_its_confidence_accuracy_and_weight():
    found = calibration(np.array([1, 0, 1, 1]), np.array([0.1, 0.1, 0.97, 1.0]))
    assert found.error() == pytest.approx((2 * 0.4 + 2 * 0.015) / 4)
    assert found.curve() == [
        {"confidence": pytest.approx(0.1), "accuracy": 0.5, "examples": 2},
        {"confidence": pytest.approx(0.985), "accuracy": 1, "examples": 2},
    ]


def test_probabilities_that_are_right_may_be_off_by_nothing():
    sure = RANDOM.random(400)
    low, high = calibration(RANDOM.random(400) < sure, sure).interval()
    assert low < 0.01 < high
    low, high = calibration(RANDOM.random(400) < sure / 2, sure).interval()
    assert 0.05 < low < 0.25 < high
