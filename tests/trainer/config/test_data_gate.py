"""Tests `data.gate`: each rule has an action, and each limit a default within its bounds."""

from flotilla.trainer.config.data import ACTIONS, LIMITS, RULES, DataGateConfig


def test_every_rule_and_limit_has_a_default():
    gate = DataGateConfig()
    assert {gate.action(rule) for rule in RULES} <= set(ACTIONS)
    for name, (default, least, most, _) in LIMITS.items():
        assert least <= gate.limit(name) == default <= most


def test_what_is_named_wins_over_all():
    gate = DataGateConfig(rules={"all": "warn", "leakage": "refuse"})
    assert gate.action("leakage") == "refuse"
    assert gate.action("type") == "warn"
