"""Tests that the metric decides how models are compared and in which direction a bound is worse."""

from functools import cache

import keras
import numpy as np
import pytest

from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation import estimates, predictions
from flotilla.trainer.evaluation.comparison import Opponents, compare
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


def test_a_metric_without_a_state_is_made_anew_without_each_group():
    found = compare(shared(classifiers)[0], ChampionRule(metric="weighted_f1"))
    assert found["method"] == T_TEST
    assert 0 < found["bound"] < found["difference"] < 1


def test_the_difference_is_that_of_all_examples_where_groups_are_made_of_some(monkeypatch):
    opponents, _ = shared(classifiers)
    whole = compare(opponents, ChampionRule(metric="weighted_f1"))
    monkeypatch.setattr(estimates, "_MOST_EXAMPLES", COUNT // 2)
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
