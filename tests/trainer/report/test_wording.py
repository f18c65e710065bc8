"""Tests that numbers show only the digits that their interval supports, and names are readable."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer.report import wording


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (0.977777, [0.9567691, 0.9886975], "0.978"),
        (0.9972222, [0.9844, 0.9995], "0.9972"),
        (45.70697, [38.1, 53.3], "45.7"),
        (3424.056, [2100.0, 4700.0], "3424"),
        (0.977777, None, "0.9778"),
        (0.977777, [0.9, math.nan], "0.9778"),
        (0.977777, [0.97, 0.97], "0.9778"),
        (0.977777, "no pair", "0.9778"),
        (123456.789, None, "123457"),
        (math.nan, [0.1, 0.2], "nan"),
        (math.inf, None, "inf"),
        (1e-12, [0.9e-12, 1.1e-12], "1.00e-12"),
        (1.234e12, [0.9e12, 1.5e12], "1.23e+12"),
        (1e-12, [-0.1, 0.1], "0.00"),
        (0.0, [0.0, 5e-324], "0"),
        (7, [1, 2], "7"),
        (None, None, "-"),
        ("a text", None, "a text"),
    ],
)
def test_an_interval_decides_the_digits(value, interval, text):
    assert wording.round_value(value, interval) == text


def test_both_ends_of_an_interval_have_the_same_digits():
    assert wording.interval_text([0.9567691, 0.99]) == "0.957 to 0.990"
    assert wording.interval_text(None) == ""


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_a_reader_sees_which_of_two_numbers_is_larger(value, threshold):
    texts = wording.apart(value, threshold, interval=[value - 1, value + 1])
    left, right = map(float, texts)
    assert (left < right, left == right) == (value < threshold, value == threshold)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("average_precision", "average precision"),
        ("macro_f1", "macro F1"),
        ("r2", "R²"),
        ("recall@label=a\nb", "recall where label is a b"),
        ("recall@label=" + "x" * 300, "recall where label is " + "x" * 59 + "…"),
        ("accuracy@label=", "accuracy where label is (empty)"),
    ],
)
def test_metrics_are_spoken(name, text):
    assert wording.spell_metric(name) == text
