"""Planted skews are named, and clean resamples are left alone."""

import numpy as np
import pytest

from tests.trainer.data_gate.skews import SKEWS, table
from tests.trainer.data_gate.tables import profile, question, split_of
from trainer.data_gate.validate import findings_of


def clean(seed, size, width):
    return split_of(table(np.random.default_rng(seed), size, width))


def named(skew, size, width, seed=1):
    champion = profile(clean(seed, size, width))
    skewed = skew(np.random.default_rng(seed + 1), clean(seed + 2, size, width))
    return {each.rule for each in findings_of(question(profile(skewed), champion))}


@pytest.mark.slow
@pytest.mark.parametrize("name", SKEWS)
def test_a_skew_is_named(name):
    skew, rules = SKEWS[name]
    width = 60 if name == "many small drifts" else 8
    assert named(skew, 3000, width) & rules
