"""Tests that intervals stay in the metric's range, have a width, and cover the true value."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from flotilla.trainer.tasks.exact import intervals
from flotilla.trainer.tasks.exact.areas import Scores
from flotilla.trainer.tasks.exact.tallies import intervals_of_averages

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
