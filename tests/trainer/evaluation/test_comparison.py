"""Tests that the metric decides how models are compared and in which direction a bound is worse."""

from functools import cache

import keras
import numpy as np
import pytest
from scipy import optimize, stats

from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation import comparison, predictions
from flotilla.trainer.evaluation.comparison import (
    Estimate,
    Opponents,
    Pairs,
    compare,
    compare_paired,
    compare_shares,
    mean,
)
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.classification import Classification
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.regression import Regression
from tests.trainer.tasks.measuring import InParts, target

COUNT, CLASSES = 120, 3
RANDOM = np.random.default_rng(11)
CLASS = RANDOM.integers(CLASSES, size=COUNT)
SURE = np.eye(CLASSES, dtype="float32")[CLASS]
NUMBERS = RANDOM.normal(size=COUNT).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2, COUNT).astype("float32")


def noisy(values, much):
    noise = np.random.default_rng(int(100 * much)).normal(size=values.shape)
    return (values + much * noise).astype("float32")


def classifiers(weights=None):
    objective = Objective(Classification(target(CLASS, num_classes=CLASSES)))
    own, other = (InParts(CLASS, noisy(SURE, much), weights) for much in (0.5, 1.0))
    return Opponents(objective=objective, own=own, other=other)


def regressions(weights=None, **said):
    objective = Objective(Regression(target(NUMBERS)), **said)
    outputs = NUMBERS[:, np.newaxis]
    own, other = (InParts(NUMBERS, noisy(outputs, much), weights) for much in (0.5, 1.0))
    return Opponents(objective=objective, own=own, other=other)


def measured(opponents):
    own, other = (
        predictions.measure_predictions(opponents.objective, each)["metrics"]
        for each in (opponents.own, opponents.other)
    )
    return {metric: value - other[metric] for metric, value in own.items()}


@cache
def shared(make):
    """Return opponents without weights, and the differences of all metrics, which take seconds."""
    opponents = make()
    return opponents, measured(opponents)


T_TEST = "t test of paired influences"
CASES = {
    "accuracy": (classifiers, "Tango's score interval"),
    "loss": (regressions, T_TEST),
    "root_mean_squared_error": (regressions, T_TEST),
    "r2_score": (regressions, T_TEST),
    "macro_f1": (classifiers, T_TEST),
    "macro_auc": (classifiers, T_TEST),
}


@pytest.mark.parametrize("metric", CASES)
def test_the_difference_is_that_of_the_metrics_and_the_bound_is_worse(metric):
    make, method = CASES[metric]
    opponents, differences = shared(make)
    found = compare(opponents, ChampionRule(metric=metric))
    assert (found["metric"], found["examples"]) == (metric, COUNT)
    assert found["difference"] == pytest.approx(differences[metric], rel=1e-3)
    assert found["method"] == method or not method
    higher = found["better"] == "higher"
    assert higher == (metric not in {"loss", "root_mean_squared_error"})
    # The challenger is better in each metric, and the bound is worse than the difference.
    assert (found["difference"] > 0) == higher
    assert (found["bound"] < found["difference"]) == higher


def test_the_main_metric_is_compared_where_none_is_named():
    found = compare(shared(classifiers)[0], ChampionRule())
    assert found["metric"] == "accuracy"
    right = [np.argmax(noisy(SURE, much), axis=1) == CLASS for much in (0.5, 1.0)]
    assert found["pairs"] == {
        "both_right": int((right[0] & right[1]).sum()),
        "only_challenger_right": int((right[0] & ~right[1]).sum()),
        "only_champion_right": int((right[1] & ~right[0]).sum()),
        "both_wrong": int((~right[0] & ~right[1]).sum()),
    }


def test_weighted_examples_are_no_pairs():
    opponents = classifiers(WEIGHTS)
    found = compare(opponents, ChampionRule())
    assert "pairs" not in found
    assert found["difference"] == pytest.approx(measured(opponents)["accuracy"], rel=1e-3)


def test_a_metric_without_a_state_is_made_anew_without_each_group_of_all_or_some(monkeypatch):
    opponents, _ = shared(classifiers)
    whole = compare(opponents, ChampionRule(metric="weighted_f1"))
    assert whole["method"] == T_TEST
    assert 0 < whole["bound"] < whole["difference"] < 1
    monkeypatch.setattr(comparison, "_MOST_EXAMPLES", COUNT // 2)
    found = compare(opponents, ChampionRule(metric="weighted_f1"))
    assert found["difference"] == whole["difference"]
    widths = [each["difference"] - each["bound"] for each in (found, whole)]
    assert widths[0] == pytest.approx(widths[1], rel=0.5)


def _span(true, given):
    del true
    return keras.ops.abs(given[:, 0])


class Span(keras.metrics.MeanMetricWrapper):
    """A metric of a user's task for which no direction is known."""

    def __init__(self):
        super().__init__(_span, name="span")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"metric": "spam"}, "gate.champion.metric: 'spam' is not measured"),
        ({"metric": "span"}, "gate.champion.better: cannot tell whether a higher or lowe"),
    ],
)
def test_what_cannot_be_compared_is_refused_unless_the_configuration_says_what_is_better(
    rule, words
):
    opponents = regressions(metrics=[f"{__name__}:Span"])
    next(map(opponents.objective.sums, opponents.own.parts()))
    with pytest.raises(ConfigError) as caught:
        compare(opponents, ChampionRule(**rule))
    assert words in str(caught.value)
    found = compare(opponents, ChampionRule(metric="span", better="lower"))
    assert found["better"] == "lower"
    assert found["bound"] > found["difference"]


Z = stats.norm.ppf(0.95)


@pytest.mark.parametrize("pairs", [(340, 5, 9, 6), (10, 0, 3, 2), (90, 8, 1, 1), (0, 4, 5, 0)])
def test_at_the_bound_of_shares_the_score_of_the_likeliest_shares_is_the_quantile(pairs):
    both, own, other, neither = pairs
    count = sum(pairs)
    found = compare_shares(Pairs(*pairs), 0.95)
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
    found = compare_shares(Pairs(100, own, other, 3), 0.95)
    assert (found.bound >= 0) is bool((own - other) / np.sqrt(own + other) >= Z)


def test_where_all_is_lost_or_won_or_equal_there_is_a_bound_too():
    lost, won, equal = (
        compare_shares(Pairs(*pairs), 0.95).bound
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
    return compare_shares(Pairs(count - own - other, own, other, 0), 0.95).bound


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
