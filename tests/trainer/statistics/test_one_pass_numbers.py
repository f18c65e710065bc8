"""Means and deviations in one pass are NumPy's in two."""

import numpy as np
import pytest

from trainer.statistics.one_pass import Moments


@pytest.mark.parametrize("cuts", [(), (1,), (0, 500), (10, 11, 12)])
def test_they_are_those_of_all_numbers(cuts):
    values = np.random.default_rng(0).normal(3, 2, 1000)
    found = Moments()
    for part in np.split(values, cuts):
        one = Moments()
        one.add(part)
        found.merge(one)
    assert (found.count, found.least, found.most) == (1000, values.min(), values.max())
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())


def test_a_large_mean_costs_no_digits():
    found = Moments()
    for part in np.split(1e9 + np.arange(100.0), 4):
        found.add(part)
    assert found.std == pytest.approx(np.arange(100.0).std(), rel=1e-6)


def test_a_constant_has_no_deviation():
    found = Moments()
    for _ in range(3):
        found.add(np.full(7, 0.1))
    assert found.std == 0


def test_they_go_on_from_their_state():
    found = Moments()
    found.add(np.array([1.0, 2.0]))
    assert Moments(*found.state()) == found
