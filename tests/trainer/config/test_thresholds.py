"""Tests the gate's thresholds: bounds on metrics and non-inferiority margins."""

from __future__ import annotations

import numpy as np
import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.thresholds import ChampionRule, present_name, split_rule
from flotilla.trainer.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("margin", "gain", "units"),
    [
        (0.02, 0.9, 0.02),
        (-0.01, 0.9, -0.01),
        ("0.02", 0.9, 0.02),
        ("2%", 0.9, 0.018),
        (" 2% ", 0.9, 0.018),
        ("2%", -50.0, 0.0),
        ("-1%", 0.5, -0.005),
        (0, 0.9, 0.0),
    ],
)
def test_a_margin_is_in_units_of_the_metric_or_a_share_of_what_is_gained(margin, gain, units):
    assert ChampionRule(margin=margin).compute_margin(gain) == pytest.approx(units)


def test_a_margin_of_classes_is_a_number_or_a_share_of_each_recall():
    recalls = np.array([0.5, 1.0])
    assert ChampionRule(class_margin="40%").compute_class_margins(recalls) == pytest.approx(
        [0.2, 0.4]
    )
    assert ChampionRule(class_margin=0.1).compute_class_margins(recalls) == pytest.approx(
        [0.1, 0.1]
    )


def test_a_margin_in_units_is_the_gates_and_no_evaluation_depends_on_it():
    rule = ChampionRule(metric="auc", margin=0.1)
    assert rule.comparison_key() == ChampionRule(metric="auc", margin=0.2).comparison_key()
    others = ({"metric": "loss"}, {"confidence": 0.9}, {"better": "lower"}, {"margin": "3%"})
    for each in (*others, {"class_margin": 0.2}):
        changed = ChampionRule(**{"metric": "auc", "margin": 0.1, **each})
        assert rule.comparison_key() != changed.comparison_key()


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ({"champion": {"margin": "two"}}, "gate.champion.margin: 'two' is not allowed: write a "),
        ({"champion": {"margin": "2%%"}}, "write a number such as 0.02, or a share"),
        ({"champion": {"margin": True}}, "gate.champion.margin: True is not allowed"),
        ({"champion": {"margin": float("inf")}}, "gate.champion.margin: inf is not allowed"),
        ({"champion": {"confidence": 0.4}}, "gate.champion.confidence: 0.4 is not allowed"),
        ({"champion": {"confidence": 1}}, "gate.champion.confidence: 1 is not allowed"),
        ({"champion": {"better": "more"}}, "gate.champion.better: 'more' is not allowed"),
        ({"champion": "not_worse"},
         "champion: the gate now compares with a margin; write champion"),
        ({"min_gain": 0.1}, "min_gain: the gate now compares with a margin; write champion: {mar"),
        ({"min": {"top-3": 0.5}},
         "'top-3' does not begin with a metric; write accuracy or accuracy@"),
        ({"max": {"loss@": 0.5}}, "'loss@' has no slice; write loss@feature=value"),
        ({"min": {"binary_accuracy": 95}}, "binary_accuracy is a share: 95 is not between 0 and"),
        ({"max": {"price_auc@shop=a": 2}}, "price_auc is a share: 2 is not between 0 and 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_by_name(gate, words):
    with pytest.raises(ConfigError) as caught:
        parse_config({"gate": gate})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_metric_of_any_task_or_output_may_be_bounded():
    gate = {"min": {"r2_score": -1.5}, "max": {"days_mean_absolute_error@shop": 20}}
    found = parse_config({"gate": gate}).gate
    assert (found.min, found.max) == (gate["min"], gate["max"])
    rules = {"Preis (€)_mae": 3.0, "_mae": 1.0, "a@b_mae@c": 2.0}
    assert parse_config({"gate": {"max": rules}}).gate.max == rules


@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        ("accuracy", ("accuracy", "", None)),
        ("accuracy@kind", ("accuracy", "kind", None)),
        ("accuracy@kind=a", ("accuracy", "kind", "a")),
        ("accuracy@kind=", ("accuracy", "kind", "")),
        ("accuracy@size (cm)=a@b=c", ("accuracy", "size (cm)", "a@b=c")),
        ("accuracy@a=b", ("accuracy", "a=b", None)),
        ("accuracy@a=b=c", ("accuracy", "a=b", "c")),
        ("x@y_mae", ("x@y_mae", "", None)),
        ("x@y_mae@a@b=1", ("x@y_mae", "a@b", "1")),
        ("f1@größe", ("f1", "größe", None)),
    ],
)
def test_a_rule_is_split_where_names_have_its_signs_themselves(rule, parts):
    metrics, features = ["accuracy", "x@y_mae"], ["kind", "size (cm)", "a", "a=b", "a@b", "größe"]
    assert split_rule(rule, metrics, features) == parts


@pytest.mark.parametrize(
    ("old", "known", "hint"),
    [
        ("pr_auc", ["auc", "average_precision"], "; it is now called 'average_precision'"),
        ("pr_auc", ["macro_average_precision"], "; it is now called 'macro_average_precision'"),
        ("auc", ["accuracy", "macro_auc"], "; it is now called 'macro_auc'"),
        ("left_pr_auc", ["left_average_precision"], "; it is now called 'left_average_precision'"),
        ("acuracy", ["accuracy"], "; did you mean 'accuracy'?"),
        ("left_rmse", ["r2_score", "left_root_mean_squared_error"],
         "; did you mean 'left_root_mean_squared_error'?"),
    ],
)  # fmt: skip
def test_a_metric_that_was_renamed_says_its_name(old, known, hint):
    assert present_name(old, known) == hint
