"""The threshold is the one of the largest F1 on the validation split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

from trainer.evaluation.threshold import best, of_manifest

EXAMPLES = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([0.0, 1e-30, 0.2, 0.20000002, 0.5, 0.7, 0.99999994, 1.0]),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    ),
    max_size=12,
)


def columns(examples):
    positive, sure, weights = zip(*examples, strict=True) if examples else ((), (), ())
    return np.array(positive, bool), np.array(sure, np.float32), np.array(weights, np.float64)


@given(EXAMPLES)
@settings(max_examples=200, deadline=None)
def test_no_other_threshold_that_tells_examples_apart_has_a_larger_f1(examples):
    positive, sure, weights = columns(examples)
    found = best(positive, sure, weights)
    kept = weights > 0
    others = np.unique(sure[kept])[:-1]
    if not len(others) or not weights[positive].sum():
        assert found is None
        return

    def f1(threshold):
        taken = sure > np.float32(threshold)
        return f1_score(positive, taken, sample_weight=weights, zero_division=0)

    assert f1(found) == pytest.approx(max(map(f1, others)))
    # It says the same in single precision, and lies between two examples.
    assert 0 < (sure[kept] > np.float32(found)).sum() < kept.sum()


@pytest.mark.parametrize(
    ("examples", "expected"),
    [
        # Told apart: half of the way.
        ([(True, 0.75, 1), (False, 0.25, 1)], 0.5),
        # Of several the one next to one half.
        ([(True, 0.9, 1), (True, 0.7, 0), (False, 0.1, 1)], 0.5),
        # Inverted, of one score, of one kind, without weight, without examples.
        ([(False, 0.75, 1), (True, 0.5, 1), (False, 0.25, 1)], 0.375),
        ([(True, 0.3, 1), (False, 0.3, 1)], None),
        ([(False, 0.3, 1), (False, 0.4, 1)], None),
        ([(True, 0.3, 0), (False, 0.4, 0)], None),
        ([], None),
        # What is not finite is not counted.
        ([(True, np.nan, 1), (True, 0.75, 1), (False, 0.25, 1)], 0.5),
        # The next number of single precision: nothing lies between.
        ([(True, 0.20000002, 1), (False, 0.2, 1)], pytest.approx(0.2)),
    ],
)
def test_what_is_chosen(examples, expected):
    assert best(*columns(examples)) == expected


def test_a_model_of_before_decides_at_one_half():
    assert of_manifest({}, [""])[""].value == 0.5
    assert of_manifest({"threshold": 0.25}, [""])[""].value == 0.25
    found = of_manifest({"threshold": {"a": 0.25}}, ["a", "b"])
    assert {name: each.value for name, each in found.items()} == {"a": 0.25, "b": 0.5}
