"""Why a recovery is full, and what is said of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.config.load import parse_config
from trainer.training.recovery import _Recovery


def reason(tree, *, lost=frozenset({1}), mixes=True, whole=True):
    strategy = SimpleNamespace(mixes_steps=mixes, variables=dict)
    made = _Recovery(parse_config(tree), strategy, None, {})
    made._held = {0: {}, 1: {}}
    return made._reason(set(lost), whole)


@pytest.mark.parametrize(
    ("recovery", "mixes", "full"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("partial", False, False),
        ("full", True, True),
    ],
)
def test_what_is_configured_and_the_strategy_decide(recovery, mixes, full):
    found = reason({"cluster": {"recovery": recovery}}, mixes=mixes)
    assert ("cluster.recovery" in found) is full


def test_where_it_is_not_possible_all_go_back():
    assert "data.partition" in reason({"data": {"partition": "dynamic"}})
    assert "averages" in reason({}, whole=False)
    assert "no other server" in reason({}, lost={0, 1})
