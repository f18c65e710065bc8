"""Tests the association of two columns, from independent to equal values."""

import numpy as np
import pytest
from scipy import stats

from flotilla.trainer.features.statistics import accumulator
from flotilla.trainer.features.statistics.accumulator import measure_association

RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=2000)
CLASSES = RANDOM.integers(0, 3, 2000).astype(float)
KINDS = [(False, False), (False, True), (True, False), (True, True)]


def of(first, second, kinds):
    return measure_association(first, second, first_is_class=kinds[0], second_is_class=kinds[1])


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_independent_says_nothing_and_what_is_equal_all(kinds):
    assert of(CLASSES, RANDOM.permutation(CLASSES), kinds) < 0.1
    assert of(CLASSES, CLASSES, kinds) == pytest.approx(1, abs=1e-3)
    assert of(np.ones(2000), CLASSES, kinds) == 0
    # Missing values are left out.
    gaps = np.where(np.arange(2000) % 2, CLASSES, np.nan)
    assert of(gaps, CLASSES, kinds) == pytest.approx(1, abs=1e-2)
    assert of(np.full(2000, np.nan), CLASSES, kinds) == 0


FAR, OTHER_FAR, FAR_CLASS = (
    np.array([first, *RANDOM.permutation(values[1:])])
    for first, values in ((1e9, NUMBERS), (1e9, NUMBERS), (3, CLASSES))
)
EVEN, MANY = CLASSES - 1, np.arange(2000.0)


@pytest.mark.parametrize(
    ("first", "second", "kinds", "most"),
    [
        # One far value says nothing.
        (FAR, OTHER_FAR, (False, False), 0.1),
        (FAR, FAR_CLASS, (False, True), 0.1),
        # A square is seen by classes alone.
        (EVEN, EVEN**2, (False, False), 0.1),
        # Many classes say nothing by chance.
        (MANY, CLASSES, (True, True), 0.1),
        (MANY, NUMBERS, (True, False), 0.15),
    ],
)
def test_what_says_little(first, second, kinds, most):
    assert of(first, second, kinds) < most
    assert of(EVEN, EVEN**2, (True, False)) > 0.99


def test_it_is_the_correlation_of_ranks():
    other = NUMBERS + RANDOM.normal(size=2000)
    expected = abs(stats.spearmanr(NUMBERS, other).statistic)
    assert of(NUMBERS, other, (False, False)) == pytest.approx(expected)


def test_equal_values_have_the_mean_of_their_ranks():
    values = np.array([3.0, -1.0, 3.0, 0.0, 3.0, 0.0])
    assert accumulator._ranks(values).tolist() == stats.rankdata(values).tolist()
