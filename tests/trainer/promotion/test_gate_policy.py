"""The policy of the gate: bounds for parts, and the champion on the same examples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.promotion.test_gate import MEASURED, decided, evaluated
from trainer import storage
from trainer.config.load import parse_config
from trainer.errors import ConfigError, UserError
from trainer.evaluation import noninferiority
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
    pairs = noninferiority.Pairs(both, only_challenger, only_champion, 0)
    count, found = sum(pairs), noninferiority.shares(pairs, 0.95)
    return {
        "uri": CHAMPION,
        "incomparable": "",
        "metrics": {"accuracy": MEASURED["accuracy"] - found.difference},
        "paired": {
            "metric": "accuracy", "better": "higher", "confidence": 0.95, "examples": count,
            "difference": found.difference, "bound": found.bound, "method": found.method,
        },
    }  # fmt: skip


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
        ("@label", "'@label' names no metric: write it as accuracy, or accuracy@label"),
        ("my metric", "'my metric' names no metric"),
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
    assert check(tmp_path, {"champion": {"margin": -0.5}}).blessed


def test_an_equal_model_is_not_worse(tmp_path: Path) -> None:
    decision = check(tmp_path, {}, champion=champion(0, 0))
    assert decision.blessed
    [rule] = decided(decision.uri)["rules"]
    assert (rule["metric"], rule["bound"]) == ("accuracy_difference", "min")
    assert rule["threshold"] == pytest.approx(-0.03 * MEASURED["accuracy"]), "3% of the champion's"
    assert -0.01 < rule["value"] < 0
    assert decided(decision.uri)["champion"] == CHAMPION
    assert storage.read_manifest(decision.uri).fields["champion"] == CHAMPION


@pytest.mark.parametrize(
    ("gained", "lost", "margin", "blessed"),
    [
        (10, 12, 0.02, True),
        (10, 12, 0.01, False),  # it may have lost more than 1 in 100
        (3, 30, 0.02, False),
        (3, 30, 0.05, True),
        (0, 0, 0.0, False),  # without a margin only a gain passes
        (12, 10, 0.0, False),  # better by noise
        (40, 10, 0.0, True),
        (40, 10, -0.015, True),
        (40, 10, -0.025, False),  # truly better, by too little
    ],
)
def test_a_loss_beyond_the_margin_has_to_be_ruled_out(
    tmp_path: Path, gained: int, lost: int, margin: float, blessed: bool
) -> None:
    policy = {"champion": {"margin": margin}}
    assert check(tmp_path, policy, champion=champion(gained, lost)).blessed is blessed


def test_seven_of_360_examples_are_a_loss_that_the_default_does_not_pass(tmp_path: Path) -> None:
    """0.9694 against 0.9889: once not significant, and so not worse."""
    policy = parse_config({}).gate.model_dump()
    [reason] = check(tmp_path, policy, champion=champion(1, 8, both=351)).reasons
    assert reason.startswith("accuracy_difference -0.0365")
    for name, allowed in (("strict", 0.03), ("covers", 0.04)):
        folder = tmp_path / name
        folder.mkdir()
        lost = champion(1, 8, both=351)
        decision = check(folder, {"champion": {"margin": allowed}}, champion=lost)
        assert decision.blessed is (name == "covers")


def test_a_refusal_names_both_metrics_and_how_many_examples_it_takes(tmp_path: Path) -> None:
    few = champion(4, 4, both=92)
    [reason] = check(tmp_path, {"champion": {"margin": 0.02}}, champion=few).reasons
    assert "accuracy_difference -0.05" in reason
    assert " is below gate.champion.margin -0.02 (accuracy 0.953125, the champion's 0.9" in reason
    assert "on the same 100 examples" in reason
    assert "100 examples are too few for this margin, it takes about 2200)" in reason
    other = tmp_path / "other"
    other.mkdir()
    [reason] = check(other, {"champion": {"margin": 0.02}}, champion=champion(0, 40)).reasons
    assert "too few" not in reason, "it is worse, whatever the number of examples"


def test_of_a_metric_of_which_less_is_better_the_bound_is_above(tmp_path: Path) -> None:
    paired = {
        "metric": "loss", "better": "lower", "confidence": 0.9, "examples": 50,
        "difference": 0.01, "bound": 0.03, "method": "by hand",
    }  # fmt: skip
    other = {"uri": CHAMPION, "incomparable": "", "metrics": {"loss": 0.2}, "paired": paired}
    [rule] = check(tmp_path, {"champion": {"margin": "20%"}}, champion=other).rules
    assert (rule.bound, rule.value, rule.passed) == ("max", 0.03, True)
    assert rule.threshold == pytest.approx(0.04)
    unknown = {**other, "paired": {**paired, "bound": None}}
    folder = tmp_path / "unknown"
    folder.mkdir()
    decision = check(folder, {}, champion=unknown)
    assert "is not a finite number" in decision.reasons[0]


@pytest.mark.parametrize(
    ("gained", "lost", "margin", "proved"),
    [(40, 10, 0.01, True), (40, 10, 0.03, False), (40, 10, -0.015, True), (10, 10, 0.0, False)],
)
def test_a_gain_is_proved_beyond_the_margin(
    tmp_path: Path, gained: int, lost: int, margin: float, proved: bool
) -> None:
    policy = {"champion": {"margin": margin}}
    decision = check(tmp_path, policy, champion=champion(gained, lost))
    assert decision.gained is proved
    assert storage.read_manifest(decision.uri).fields["gained"] is proved


@pytest.mark.parametrize("old", [{"champion": "better"}, {"min_gain": 0.1}, {"significance": 0.05}])
def test_the_keys_of_an_earlier_version_say_what_to_write_instead(old: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config({"gate": old})
    text = str(error.value)
    assert text.startswith(f"gate: {next(iter(old))}: the gate compares by a margin now; write ")
    assert "champion: {margin: 0.02, confidence: 0.95}" in text


@pytest.mark.parametrize("margin", ["a lot", "2%%", "%", True, None, "nan", math.inf])
def test_a_margin_is_a_number_or_a_share(margin: Any) -> None:
    with pytest.raises(ConfigError, match=r"^gate\.champion\.margin: .* write a number such as"):
        parse_config({"gate": {"champion": {"margin": margin}}})


def test_a_champion_that_cannot_be_asked_refuses(tmp_path: Path) -> None:
    other = {"uri": CHAMPION, "incomparable": "it knows 9 classes, and this model 10"}
    decision = check(tmp_path, {}, champion=other)
    assert not decision.blessed
    [reason] = decision.reasons
    assert "it knows 9 classes, and this model 10; give this model another name" in reason
