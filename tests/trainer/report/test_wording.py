"""Numbers with the digits that their interval leaves them, and rules in plain words."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.report import wording

RULE = {"metric": "accuracy", "key": "gate.min", "bound": "min", "threshold": 0.95}
GAIN = {"metric": "accuracy_difference", "key": "gate.champion.margin", "bound": "min"}


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
def test_an_interval_decides_the_digits(value: Any, interval: Any, text: str) -> None:
    assert wording.rounded(value, interval) == text


def test_both_ends_of_an_interval_have_the_same_digits() -> None:
    assert wording.interval_text([0.9567691, 0.99]) == "0.957 to 0.990"
    assert wording.interval_text(None) == ""


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_a_reader_sees_which_of_two_numbers_is_larger(value: float, threshold: float) -> None:
    left, right = (float(each) for each in wording.apart(value, threshold, [value - 1, value + 1]))
    if value != threshold:
        assert (left < right) == (value < threshold)
        assert left != right


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({**RULE, "value": 0.9639}, "Accuracy is 0.9639; it has to be at least 0.95 (gate.min)."),
        (
            {**RULE, "metric": "average_precision@label=7", "value": 0.5},
            "Average precision where label is 7 is 0.5; it has to be at least 0.95 (gate.min).",
        ),
        (
            {**RULE, "value": None},
            "Accuracy is not a finite number; it has to be at least 0.95 (gate.min).",
        ),
        (
            {**GAIN, "value": -0.0073541, "threshold": -0.0293333},
            "Accuracy may be up to 0.007354 lower than the champion's; up to 0.02933 is allowed "
            "(gate.champion.margin).",
        ),
        (
            {**GAIN, "value": 0.02, "threshold": 0.01},
            "Accuracy is at least 0.02 better than the champion's; a gain of 0.01 is asked for "
            "(gate.champion.margin).",
        ),
        ({**GAIN, "value": None, "threshold": 0.01},
         "Accuracy could not be compared with that of the champion."),
        ({"metric": "labelled", "value": 1, "threshold": 1, "bound": "min", "passed": True},
         "The labels are as many as the model has outputs."),
    ],
)  # fmt: skip
def test_rules_are_sentences(rule: dict[str, Any], text: str) -> None:
    assert wording.sentence(rule) == text


def test_a_rule_says_what_the_examples_leave_open() -> None:
    text = wording.sentence({**RULE, "value": 0.97777}, {"accuracy": [0.9567, 0.9886]})
    assert text.startswith("Accuracy is 0.978, between 0.957 and 0.989 at 95 %; it has to be")


@given(st.dictionaries(st.sampled_from(["metric", "key", "bound", "threshold", "value", "passed"]),
                       st.none() | st.floats() | st.text() | st.integers()))  # fmt: skip
def test_whatever_a_rule_holds_it_is_a_sentence(rule: dict[str, Any]) -> None:
    assert wording.sentence(rule).endswith(".")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (7.25, "7.2 s"), (59.4, "59 s"), (63.0, "1 min 03 s"), (3900, "1 h 05 min"),
     (200_000, "2 d 7 h"), (-1, "-1"), (None, "-"), (math.nan, "nan"), (math.inf, "inf")],
)  # fmt: skip
def test_durations(seconds: Any, text: str) -> None:
    assert wording.duration(seconds) == text
