"""Tests that the bound of a difference is wrong no more often than its confidence level allows."""

from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

from flotilla.trainer.evaluation import noninferiority
from flotilla.trainer.evaluation.noninferiority import Estimate, Pairs, compare_paired, mean

Z = stats.norm.ppf(0.95)


@pytest.mark.parametrize("pairs", [(340, 5, 9, 6), (10, 0, 3, 2), (90, 8, 1, 1), (0, 4, 5, 0)])
def test_at_the_bound_of_shares_the_score_of_the_likeliest_shares_is_the_quantile(pairs):
    both, own, other, neither = pairs
    count = sum(pairs)
    found = noninferiority.shares(Pairs(*pairs), 0.95)
    assert found.difference == pytest.approx((own - other) / count)

    def unlikely(lost):
        won = lost + found.bound
        return -(
            own * np.log(won + 1e-300)
            + other * np.log(lost + 1e-300)
            + (both + neither) * np.log(1 - won - lost + 1e-300)
        )

    least, most = max(0, -found.bound), (1 - found.bound) / 2
    lost = optimize.minimize_scalar(
        unlikely, bounds=(least, most), method="bounded", options={"xatol": 1e-12}
    ).x
    variance = (2 * lost + found.bound - found.bound**2) / count
    assert (found.difference - found.bound) / np.sqrt(variance) == pytest.approx(Z, abs=1e-3)


@pytest.mark.parametrize(("own", "other"), [(15, 6), (14, 6), (20, 10), (21, 10), (6, 15), (3, 0)])
def test_at_a_margin_of_nothing_it_is_the_test_of_mcnemar(own, other):
    found = noninferiority.shares(Pairs(100, own, other, 3), 0.95)
    assert (found.bound >= 0) is bool((own - other) / np.sqrt(own + other) >= Z)


def test_where_all_is_lost_or_won_or_equal_there_is_a_bound_too():
    lost, won, equal = (
        noninferiority.shares(Pairs(*pairs), 0.95).bound
        for pairs in ((0, 0, 50, 0), (0, 50, 0, 0), (50, 0, 0, 0))
    )
    assert lost == -1
    assert 0.8 < won < 1
    assert -0.06 < equal < 0, "none of 50 differs: of others a few may"


def compared(own, other, better="higher", confidence=0.95, lost=0.0):
    return compare_paired(mean(own), mean(other), confidence, better, lost)


def test_the_better_side_is_the_other_side_of_the_same_bound():
    own, other = np.random.default_rng(0).exponential(size=(2, 200))
    high, low = compared(own, other), compared(-own, -other, "lower")
    assert (low.difference, low.bound) == (-high.difference, -high.bound)
    assert high.bound < high.difference


def test_of_normal_differences_it_is_the_test_of_student():
    d = np.random.default_rng(1).normal(size=400)
    found = compared(d, 0 * d)
    wanted = d.mean() - stats.t.ppf(0.95, 399) * d.std(ddof=1) / 20
    assert found.bound == pytest.approx(wanted, rel=0.05)


def test_weights_are_shares_of_the_mean_and_none_is_no_example():
    values, weights = np.array([1.0, 3.0, 9.0]), np.array([1, 1, 0])
    assert mean(values, weights).value == 2
    assert mean(values, weights).fewest == 2


def test_equal_values_lose_nothing_and_one_example_says_nothing():
    zeros, ones = np.zeros(30), np.ones(30)
    assert compared(zeros, zeros, "lower").bound == 0
    assert compared(ones, zeros).bound == pytest.approx(1)
    assert compared(ones[:1], zeros[:1]).bound == -np.inf
    assert compared(ones[:1], zeros[:1], "lower").bound == np.inf


def test_one_example_of_many_that_differs_makes_a_wide_bound():
    rare = np.zeros(30)
    rare[0] = 1
    assert -0.3 < compared(rare, 0 * rare).bound < -0.02
    assert -0.3 < compared(0 * rare, rare).bound < -0.1


def test_a_share_of_what_the_champion_gains_is_no_surer_than_a_number():
    own, other = np.random.default_rng(2).normal(size=(2, 100))
    own += 3 * other
    plain, share = compared(own, other), compared(own, other, lost=0.5)
    assert share.bound < plain.bound
    assert compared(own, 10 * other, lost=0.5).bound == compared(own, 10 * other).bound


def test_examples_of_a_unit_count_as_one():
    found = Estimate(0.5, np.array([1.0, 2, 3, -6]), 4).sum_units(np.array([0, 0, 1, 1]))
    assert found.influences.tolist() == [3, -3]
    assert found.fewest == 2


def at_most(share, count):
    """Return the share that `count` draws exceed by chance only once in a thousand times."""
    return share + 3.1 * np.sqrt(share * (1 - share) / count)


@cache
def bound(own, other, count):
    return noninferiority.shares(Pairs(count - own - other, own, other, 0), 0.95).bound


MARGIN, EXAMPLES = 0.03, 360


@pytest.mark.parametrize("differ", [0.04, 0.1])
def test_a_model_worse_by_the_margin_is_promoted_no_more_often_than_the_confidence_says(differ):
    won = (differ - MARGIN) / 2
    drawn = np.random.default_rng(1).multinomial(
        EXAMPLES, [won, won + MARGIN, 1 - 2 * won - MARGIN], 4000
    )
    passed = [bound(own, other, EXAMPLES) >= -MARGIN for own, other, _ in drawn.tolist()]
    assert np.mean(passed) <= at_most(0.05, 4000)


@pytest.mark.parametrize(("count", "confidence"), [(30, 0.95), (120, 0.99), (1500, 0.95)])
def test_a_mean_that_is_worse_by_the_margin_is_seldom_promoted(count, confidence):
    generator, passed, nights = np.random.default_rng(3), 0, 1000
    for _ in range(nights):
        # The losses are skewed, and the challenger's loss is higher by 0.1, the margin.
        hard = generator.exponential(size=count)
        d = 0.1 + hard * generator.normal(0, 0.5, count)
        passed += compared(d, 0 * d, "lower", confidence).bound <= 0.1
    assert passed / nights <= at_most(1 - confidence, nights)
