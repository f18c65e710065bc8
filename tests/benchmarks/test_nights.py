"""A thousand nights of the gate, simulated; what its page says of them is what comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import nights

HOW_TO = Path(__file__).parents[2] / "docs/how-to"


@pytest.fixture(scope="module")
def found():
    return nights.cases()


def test_the_page_has_what_is_simulated(found):
    assert nights.table(found) in (HOW_TO / "gate.md").read_text(encoding="utf-8")
    picture = {case: each for case, each in found.items() if "begun" in case}
    assert nights.drawn(picture) == (HOW_TO / "gate-nights.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("made", [nights.equal, nights.wandering])
def test_equal_models_do_not_drift_down_beyond_the_margin(made, seed):
    after = nights.simulated(made, nights.by_margin, seed=seed)
    assert after.lowest >= nights.BEGIN - nights.MARGIN
    assert after.promoted > 0.7 * nights.NIGHTS


def test_a_slow_decline_is_stopped(found):
    stopped, alone = (found[f"each worse by 0.005: {gate}"] for gate in list(nights.GATES)[:2])
    assert stopped.lowest >= nights.BEGIN - 2 * nights.MARGIN
    assert alone.lowest < 0.6


def test_models_worse_by_the_margin_are_promoted_as_seldom_as_the_confidence_says():
    seeds = range(5)
    promoted = sum(
        nights.simulated(nights.worse, nights.by_margin, seed=seed, keep=True).promoted
        for seed in seeds
    )
    count, share = nights.NIGHTS * len(seeds), 1 - nights.CONFIDENCE
    # By chance more once in a thousand times.
    assert promoted / count <= share + 3.1 * np.sqrt(share * (1 - share) / count)
