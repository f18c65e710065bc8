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
def test_what_is_independent_says_nothing(kinds):
    other = RANDOM.permutation(CLASSES)
    assert of(CLASSES, other, kinds) < 0.1


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_equal_says_all(kinds):
    assert of(CLASSES, CLASSES, kinds) == pytest.approx(1, abs=1e-3)


def test_it_is_the_correlation_of_ranks():
    other = NUMBERS + RANDOM.normal(size=2000)
    expected = abs(stats.spearmanr(NUMBERS, other).statistic)
    assert of(NUMBERS, other, (False, False)) == pytest.approx(expected)


def test_one_far_value_says_nothing():
    first, second = NUMBERS.copy(), RANDOM.permutation(NUMBERS)
    classes = RANDOM.permutation(CLASSES)
    first[0] = second[0] = 1e9
    classes[0] = 3
    assert of(first, second, (False, False)) < 0.1
    assert of(first, classes, (False, True)) < 0.1


def test_a_square_is_seen_by_classes_alone():
    even = CLASSES - 1
    assert of(even, even**2, (False, False)) < 0.1
    assert of(even, even**2, (True, False)) > 0.99


def test_many_classes_say_nothing_by_chance():
    many = np.arange(2000.0)
    assert of(many, CLASSES, (True, True)) < 0.1
    assert of(many, NUMBERS, (True, False)) < 0.15


@pytest.mark.parametrize("kinds", KINDS)
def test_missing_values_are_left_out(kinds):
    gaps = CLASSES.copy()
    gaps[::2] = np.nan
    assert of(gaps, CLASSES, kinds) == pytest.approx(1, abs=1e-2)
    assert of(np.full(2000, np.nan), CLASSES, kinds) == 0


@pytest.mark.parametrize("kinds", KINDS)
def test_a_constant_says_nothing(kinds):
    assert of(np.ones(2000), CLASSES, kinds) == 0


def test_equal_values_have_the_mean_of_their_ranks():
    values = np.array([3.0, -1.0, 3.0, 0.0, 3.0, 0.0])
    assert accumulator._ranks(values).tolist() == stats.rankdata(values).tolist()
