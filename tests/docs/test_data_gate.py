"""The guide to the gate on data has every rule and every limit."""

import re

from tests.conftest import ROOT
from trainer.config.data_gate import LIMITS, RULES

GUIDE = (ROOT / "docs" / "how-to" / "data-gate.md").read_text(encoding="utf-8")


def rows(heading):
    table = GUIDE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \| (\S+) \| (.+) \|$", table, re.MULTILINE)


def test_rules_and_limits_are_those_of_the_configuration():
    assert rows("rule") == [(name, action, what) for name, (action, what) in RULES.items()]
    assert rows("limit") == [
        (name, f"{default:g}", what) for name, (default, _, _, what) in LIMITS.items()
    ]
