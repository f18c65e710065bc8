"""The metric decides which test compares two models, and which side of its bound is the bad one."""

from functools import cache

import keras
import numpy as np
import pytest
from scipy import optimize, stats

from tests.trainer.tasks.measuring import InParts, target
from trainer.config.thresholds import ChampionRule
from trainer.errors import ConfigError
from trainer.evaluation import comparison, noninferiority
from trainer.evaluation.comparison import Opponents, compare
from trainer.evaluation.noninferiority import Pairs, Sums
from trainer.tasks.classification import Classification
from trainer.tasks.objective import Objective
from trainer.tasks.regression import Regression

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


def measured(opponents, metric):
    """Return the difference of the metrics of both models."""
    own, other = (
        opponents.objective.means(sum(map(opponents.objective.sums, each.parts())))[metric]
        for each in (opponents.own, opponents.other)
    )
    return own - other


CASES = {
    "accuracy": (classifiers, "Tango's score interval"),
    "loss": (regressions, "paired bootstrap-t"),
    "mean_absolute_error": (regressions, "paired bootstrap-t"),
    "root_mean_squared_error": (regressions, ""),
    "r2_score": (regressions, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("metric", CASES)
def test_the_difference_is_that_of_the_metrics_and_the_bound_is_worse(metric):
    make, method = CASES[metric]
    opponents = make()
    found = compare(opponents, ChampionRule(metric=metric))
    assert (found["metric"], found["examples"]) == (metric, COUNT)
    assert found["difference"] == pytest.approx(measured(opponents, metric), rel=1e-3)
    assert found["method"] == method or not method
    higher = found["better"] == "higher"
    assert higher == (metric in {"accuracy", "r2_score"})
    # The challenger is better here, whatever better means, and its bound is nearer to the worse.
    assert (found["difference"] > 0) == higher
    assert (found["bound"] < found["difference"]) == higher


def test_the_main_metric_is_compared_where_none_is_named():
    found = compare(classifiers(), ChampionRule())
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
    assert found["difference"] == pytest.approx(measured(opponents, "accuracy"), rel=1e-3)


def test_a_metric_without_a_state_is_made_anew_without_each_group():
    found = compare(classifiers(), ChampionRule(metric="weighted_f1"))
    assert found["method"] == "paired jackknife of groups"
    assert 0 < found["bound"] < found["difference"] < 1


def test_the_difference_is_that_of_all_examples_where_groups_are_made_of_some(monkeypatch):
    whole = compare(classifiers(), ChampionRule(metric="weighted_f1"))
    monkeypatch.setattr(comparison, "_MOST_EXAMPLES", COUNT // 2)
    found = compare(classifiers(), ChampionRule(metric="weighted_f1"))
    assert found["difference"] == whole["difference"]
    widths = [each["difference"] - each["bound"] for each in (found, whole)]
    assert widths[0] == pytest.approx(widths[1], rel=0.5)


def _span(true, given):
    del true
    return keras.ops.abs(given[:, 0])


class Span(keras.metrics.MeanMetricWrapper):
    """A metric of the user's: nobody knows which value is better."""

    def __init__(self):
        super().__init__(_span, name="span")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"metric": "spam"}, "gate.champion.metric: 'spam' is not measured"),
        ({"metric": "span"}, "gate.champion.better: it is not known which value of 'span' is"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(rule, words):
    opponents = regressions(metrics=[f"{__name__}:Span"])
    next(map(opponents.objective.sums, opponents.own.parts()))
    with pytest.raises(ConfigError) as caught:
        compare(opponents, ChampionRule(**rule))
    assert words in str(caught.value)


def test_the_configuration_says_what_is_better_of_a_metric_of_the_users():
    opponents = regressions(metrics=[f"{__name__}:Span"])
    next(map(opponents.objective.sums, opponents.own.parts()))
    found = compare(opponents, ChampionRule(metric="span", better="lower"))
    assert found["better"] == "lower"
    assert found["bound"] > found["difference"]


def test_models_without_any_difference_lose_nothing():
    constant = np.zeros(COUNT, "float32")
    task = Regression(target(NUMBERS))
    same = InParts(constant, constant[:, np.newaxis])
    opponents = Opponents(objective=Objective(task), own=same, other=same)
    found = compare(opponents, ChampionRule(metric="mean_absolute_error"))
    assert (found["difference"], found["bound"]) == (0, 0)


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
