"""Tests means, metrics of groups, and calibration against direct computations."""

from __future__ import annotations

import numpy as np
import pytest

from flotilla.trainer.tasks.exact.sums import Calibration, Groups, Moments

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
