"""Tests that areas under curves equal scikit-learn's, and that influences are derivatives."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.tasks.areas import areas, influences

COUNT = 3000
RANDOM = np.random.default_rng(7)
SCORES = {
    "spread": RANDOM.normal(size=COUNT),
    "ties": RANDOM.normal(size=COUNT).round(),
    "a narrow band": -7 - RANDOM.random(COUNT) / 1e4,
    "far from zero": 1e6 + RANDOM.normal(size=COUNT),
    "one value": np.full(COUNT, 0.25),
}
WEIGHTS = {
    "none": None,
    "of all sizes": 10.0 ** RANDOM.integers(-9, 9, COUNT),
    "tiny": RANDOM.random(COUNT) * 1e-200,
    "many zeros": np.where(RANDOM.random(COUNT) < 0.3, 0, RANDOM.random(COUNT)),
}


def labels(share):
    found = RANDOM.random(COUNT) < share
    found[:2] = True
    return found


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("given", SCORES)
def test_areas_are_scikit_learns(given, weights):
    share = 0.001 if weights == "none" else 0.2
    true, score = labels(share), SCORES[given].astype(np.float32)
    weight = WEIGHTS[weights]
    if weight is not None:
        # Positive and negative examples both need a positive total weight.
        weight = np.where(np.arange(COUNT) < 4, weight.max(), weight)
    found = areas(true, score, weight)
    # Scale tiny weights, because scikit-learn's sums of tiny weights lose all precision.
    theirs = weight if weights != "tiny" else weight * 1e200
    assert found.auc == pytest.approx(scores.roc_auc_score(true, score, sample_weight=theirs))
    expected = scores.average_precision_score(true, score, sample_weight=theirs)
    assert found.average_precision == pytest.approx(expected, abs=1e-9)


def test_one_score_for_all_is_what_a_constant_reaches():
    true = labels(0.01)
    assert areas(true, np.zeros(COUNT)) == pytest.approx((0.5, true.mean()))


@pytest.mark.parametrize("kind", [True, False])
def test_examples_of_one_kind_have_no_area(kind):
    true = np.full(COUNT, kind)
    assert np.isnan(areas(true, SCORES["spread"])).all()
    # Only examples of one kind have a positive weight.
    true[0] = not kind
    assert np.isnan(areas(true, SCORES["spread"], (true == kind).astype(float))).all()
    assert np.isnan(areas(true[:0], SCORES["spread"][:0])).all()


@pytest.mark.parametrize("given", ["spread", "ties"])
def test_influences_are_derivatives_by_the_weights(given):
    score, weight = SCORES[given][:60], RANDOM.uniform(0.5, 2, 60)
    true = RANDOM.random(60) < 0.3
    found, each = influences(true, score, weight)
    assert found == areas(true, score, weight)
    for place in range(60):
        step = np.where(np.arange(60) == place, 1e-6, 0)
        more, less = (np.array(areas(true, score, weight + by)) for by in (step, -step))
        derivative = (more - less) / 2e-6
        assert [each.auc[place], each.average_precision[place]] == pytest.approx(derivative, 1e-4)
    assert [weight @ one for one in each] == pytest.approx([0, 0], abs=1e-12)
