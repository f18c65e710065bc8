"""The policy of the gate: bounds for parts, and the champion on the same examples."""

from __future__ import annotations

from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.promotion.test_gate import MEASURED, decided, evaluated
from trainer import storage
from trainer.config.load import parse_config
from trainer.errors import ConfigError, UserError
from trainer.evaluation.champion import paired
from trainer.promotion import gate

SLICES = {
    "label": [
        {"value": "0", "metrics": {"accuracy": 0.99, "loss": 0.1}},
        {"value": "a=b", "metrics": {"accuracy": 0.4, "loss": 2.0}},
    ]
}
CHAMPION = "file:///registry/digits/3"


def check(folder: Path, policy: dict[str, Any], **measured: Any) -> gate.Decision:
    evaluation = evaluated(folder, MEASURED, slices=SLICES, **measured)
    config = parse_config({"gate": {"min": {}, **policy}})
    return gate.check(config, evaluation, storage.uri_of(folder / "d"))


def champion(only_challenger: int, only_champion: int, both: int = 900) -> dict[str, Any]:
    """Return what an evaluation says of a champion, by how often who alone was right."""
    return {
        "uri": CHAMPION,
        "incomparable": "",
        "metrics": {
            "accuracy": MEASURED["accuracy"] + (only_champion - only_challenger) / 1000,
        },
        "paired": mcnemar(only_challenger, only_champion, both),
    }


def mcnemar(only_challenger: int, only_champion: int, both: int) -> dict[str, Any]:
    right, wrong = [[0.0, 1.0]], [[1.0, 0.0]]
    own = right * only_challenger + wrong * only_champion + right * both
    other = wrong * only_challenger + right * only_champion + right * both
    return paired(np.ones(len(own), int), np.array(own), np.array(other))


def test_one_part_of_a_slice(tmp_path: Path) -> None:
    policy = {"min": {"accuracy@label=0": 0.9, "accuracy@label=a=b": 0.3}}
    decision = check(tmp_path, policy)
    assert decision.blessed
    assert [rule.metric for rule in decision.rules] == ["accuracy@label=0", "accuracy@label=a=b"]
    assert decided(decision.uri)["reasons"][0] == "accuracy@label=0 0.99 keeps to gate.min 0.9"


def test_every_part_of_a_slice_has_its_rule(tmp_path: Path) -> None:
    decision = check(tmp_path, {"max": {"loss@label": 1.0}})
    assert not decision.blessed
    assert [(rule.metric, rule.passed) for rule in decision.rules] == [
        ("loss@label=0", True), ("loss@label=a=b", False),
    ]  # fmt: skip
    assert decision.reasons == ("loss@label=a=b 2.0 is above gate.max 1.0",)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("accuracy@labl", "gate.min.accuracy@labl: there is no slice by 'labl'; did you mean"),
        ("accuracy@x=1", "gate.min.accuracy@x=1: there is no slice by 'x' (sliced by: label)"),
        ("accuracy@label=9", "gate.min.accuracy@label=9: no example has label '9' (there is 0, a"),
        ("macro_f1@label=0", "gate.min.macro_f1@label=0: 'macro_f1' was not measured"),
    ],
)
def test_a_part_that_is_not_there_is_named(tmp_path: Path, rule: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        check(tmp_path, {"min": {rule: 0.5}})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("accuray@label", "no metric 'accuray' of a slice; did you mean 'accuracy'?"),
        ("roc_auc@label", "no metric 'roc_auc' of a slice"),
        ("accuracy@", "'accuracy@' names no slice: write accuracy@feature=value"),
        ("accuracy@=3", "'accuracy@=3' names no slice"),
    ],
)
def test_a_wrong_rule_is_refused_by_the_configuration(rule: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"gate": {"min": {rule: 0.5}}})
    assert message in str(error.value)


def test_a_share_of_a_part_is_a_share() -> None:
    with pytest.raises(ConfigError, match="is not between 0 and 1"):
        parse_config({"gate": {"min": {"accuracy@label=3": 95}}})


def test_without_a_champion_there_is_no_rule_about_it(tmp_path: Path) -> None:
    assert check(tmp_path, {"champion": "better"}).blessed


def test_an_equal_model_is_not_worse(tmp_path: Path) -> None:
    decision = check(tmp_path, {}, champion=champion(0, 0))
    assert decision.blessed
    [rule] = decided(decision.uri)["rules"]
    assert (rule["metric"], rule["value"], rule["threshold"]) == ("p_worse", 1.0, 0.05)
    assert decided(decision.uri)["champion"] == CHAMPION
    assert storage.read_manifest(decision.uri).fields["champion"] == CHAMPION


@pytest.mark.parametrize(
    ("gained", "lost", "blessed"), [(10, 12, True), (3, 30, False), (0, 4, True), (0, 5, False)]
)
def test_only_a_real_loss_is_worse(tmp_path: Path, gained: int, lost: int, blessed: bool) -> None:
    assert check(tmp_path, {}, champion=champion(gained, lost)).blessed is blessed


def test_a_refusal_against_the_champion_names_both_metrics(tmp_path: Path) -> None:
    [reason] = check(tmp_path, {}, champion=champion(0, 40)).reasons
    assert reason.startswith("p_worse ")
    assert reason.endswith(
        " is below gate.significance 0.05 "
        "(accuracy 0.953125, the champion's 0.993125, on the same examples)"
    )


@pytest.mark.parametrize(
    ("gained", "lost", "least", "blessed"),
    [
        (0, 0, 0.0, False),  # an unchanged model is not better
        (12, 10, 0.0, False),  # better by noise
        (40, 10, 0.0, True),
        (40, 10, 0.02, True),
        (40, 10, 0.04, False),  # truly better, by too little
        (10, 40, 0.0, False),
    ],
)
def test_better_means_truly_and_by_enough(
    tmp_path: Path, gained: int, lost: int, least: float, blessed: bool
) -> None:
    policy = {"champion": "better", "min_gain": least}
    decision = check(tmp_path, policy, champion=champion(gained, lost))
    assert decision.blessed is blessed
    assert [rule.metric for rule in decision.rules] == ["gain", "p_better"]


def test_a_champion_that_cannot_be_asked_refuses(tmp_path: Path) -> None:
    other = {"uri": CHAMPION, "incomparable": "it knows 9 classes, and this model 10"}
    decision = check(tmp_path, {}, champion=other)
    assert not decision.blessed
    [reason] = decision.reasons
    assert "it knows 9 classes, and this model 10; give this model another name" in reason


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (5, 0), (0, 5), (12, 10), (300, 200)])
def test_the_paired_test_is_the_binomial_sum(wins: int, losses: int) -> None:
    found, count = mcnemar(wins, losses, 7), wins + losses
    tail = sum(comb(count, k) for k in range(wins, count + 1)) / 2**count
    assert found["p_better"] == pytest.approx(tail)
    assert found["p_worse"] == pytest.approx(
        sum(comb(count, k) for k in range(losses, count + 1)) / 2**count
    )
    assert [found[name] for name in ("only_challenger_right", "only_champion_right")] == [
        wins, losses,
    ]  # fmt: skip
    assert (found["both_right"], found["both_wrong"]) == (7, 0)
