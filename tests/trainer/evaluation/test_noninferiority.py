"""The bounds: against the definition, and how often they are wrong over many test sets."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy import optimize, stats

from trainer.evaluation import noninferiority
from trainer.evaluation.noninferiority import Pairs, Sums

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


def test_sums_of_parts_are_those_of_the_whole_and_weights_repeat_an_example():
    generator = np.random.default_rng(0)
    d, w = generator.normal(size=3000), generator.integers(1, 4, 3000)
    whole = Sums.of(d, w)
    assert Sums.of(d[:1000], w[:1000]).plus(Sums.of(d[1000:], w[1000:])) == pytest.approx(whole)
    found = noninferiority.means(d, w, 0.95, "higher")
    assert found == noninferiority.means_of_sums(whole, 0.95, "higher")
    assert found.difference == pytest.approx(np.average(d, weights=w))


def test_better_is_the_other_side_of_the_same_bound():
    d = np.random.default_rng(0).exponential(size=200) - 1
    high = noninferiority.means(d, None, 0.95, "higher")
    low = noninferiority.means(-d, None, 0.95, "lower")
    assert (low.difference, low.bound) == (-high.difference, -high.bound)
    assert high.bound < high.difference


def test_equal_values_lose_nothing_and_one_value_says_nothing():
    assert noninferiority.means(np.zeros(30), None, 0.95, "lower").bound == 0
    assert noninferiority.means(np.full(30, 0.5), None, 0.95, "higher").bound == 0.5
    rare = np.zeros(30)
    rare[0] = 1
    assert noninferiority.means(rare, None, 0.95, "higher").bound == -np.inf


def test_a_metric_that_is_not_defined_for_a_draw_counts_as_the_worst():
    states = np.eye(3)

    def result(state):
        return float(np.divide(*state[:2])) if state[1] else np.nan

    found = noninferiority.states(states, states * 2, result, 0.95, "higher")
    assert (found.difference, found.bound) == (0, -np.inf)


def at_most(share, count):
    """Return a share that as many draws exceed by chance once in a thousand times."""
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


@pytest.mark.parametrize("count", [120, 1500])
@pytest.mark.slow
def test_a_mean_that_is_worse_by_the_margin_is_seldom_promoted(count):
    generator, passed, nights = np.random.default_rng(3), 0, 400
    for _ in range(nights):
        # Skewed, as losses are; the challenger's are higher by 0.1.
        hard = generator.exponential(size=count)
        d = 0.1 + hard * generator.normal(0, 0.5, count)
        passed += noninferiority.means(d, None, 0.95, "lower").bound <= 0.1
    assert passed / nights <= at_most(0.05, nights)


def test_a_metric_of_states_that_is_worse_by_the_margin_is_seldom_promoted(monkeypatch):
    monkeypatch.setattr(noninferiority, "RESAMPLES", 200)
    generator, passed, nights = np.random.default_rng(4), 0, 200

    def root(state):
        return float(np.sqrt(state[0] / state[1]))

    for _ in range(nights):
        hard = generator.normal(size=200)
        own, other = (
            np.stack([(size * (hard + generator.normal(0, 0.5, 200))) ** 2, np.ones(200)], axis=1)
            for size in (1.1, 1.0)
        )
        margin = 0.1 * np.sqrt(1.25)
        passed += noninferiority.states(own, other, root, 0.95, "lower").bound <= margin
    assert passed / nights <= at_most(0.05, nights)
