"""Tests that rules of the gate and the registry are explained without statistical terms."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer.report import rules
from flotilla.trainer.report.rules import CLASS_MARGIN, CONSTANT, MARGIN

RULE = {"metric": "accuracy", "key": "gate.min", "bound": "min", "threshold": 0.95}
MARGINAL = {"metric": "accuracy_difference", "key": MARGIN, "bound": "min", "threshold": -0.02}
BOTH = {"metric": "accuracy", "own": 0.953125, "other": 0.9575, "examples": 360}
ERROR = {"metric": "mean_absolute_error", "own": 46.93, "other": 44.1}


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({**RULE, "value": 0.9639}, "Accuracy is 0.9639; it must be at least 0.95 (gate.min)."),
        (
            {**RULE, "metric": "macro_auc@label=7", "value": 0.5},
            "Macro AUC where label is 7 is 0.5; it must be at least 0.95 (gate.min).",
        ),
        (
            {**RULE, "value": None},
            "Accuracy is not a finite number; it must be at least 0.95 (gate.min).",
        ),
        (
            {**RULE, "value": 0.9499999999999999},
            "Accuracy is 0.9499999999999998; it must be at least 0.95 (gate.min).",
        ),
        (
            {**MARGINAL, "value": -0.0504, "found": {**BOTH, "needed": 2200}},
            "Accuracy is 0.9531, and 0.9575 for the champion; it may be up to 0.050 lower, but "
            "only 0.020 is allowed (gate.champion.margin). 360 test examples are too few to be "
            "sure; about 2,200 would be enough.",
        ),
        (
            {**MARGINAL, "value": -0.0104, "passed": True, "found": {**BOTH, "needed": 0}},
            "Accuracy is 0.9531, and 0.9575 for the champion; it may be up to 0.010 lower, and "
            "0.020 is allowed (gate.champion.margin).",
        ),
        (
            {**MARGINAL, "value": 0.02, "threshold": 0.01},
            "Accuracy is at least 0.020 higher than for the champion, and must be at least "
            "0.010 higher (gate.champion.margin).",
        ),
        (
            {**MARGINAL, "metric": "mean_absolute_error_difference", "bound": "max",
             "value": 3.14, "threshold": 1.0, "found": ERROR},
            "Mean absolute error is 46.93, and 44.10 for the champion; it may be up to 3.1 higher, "
            "but only 1.0 is allowed (gate.champion.margin).",
        ),
        (
            {**MARGINAL, "value": None, "threshold": 0.01},
            "Accuracy cannot be compared with the champion on these examples "
            "(gate.champion.margin).",
        ),
        (
            {**MARGINAL, "value": -0.01, "note": "no gain has been proved since version 3",
             "found": {**BOTH, "opponent": "version 3"}},
            "Accuracy is 0.9531, and 0.9575 for version 3; it may be up to 0.010 lower, and 0.020 "
            "is allowed (gate.champion.margin). No gain has been proved since version 3.",
        ),
        (
            {"metric": "average_precision_over_constant", "key": CONSTANT, "bound": "min",
             "threshold": 0, "value": -0.004,
             "found": {"metric": "average_precision", "own": 0.0312, "other": 0.03,
                       "answer": "0.03 for 'yes'", "examples": 360, "needed": 2000}},
            "Average precision is 0.03120, and 0.03000 for a constant (0.03 for 'yes'); it may be "
            "up to 0.0040 lower, and must be higher (gate.constant). 360 test examples are too "
            "few to be sure; about 2,000 would be enough.",
        ),
        (
            {"metric": "recall_difference@label=churned", "key": CLASS_MARGIN, "bound": "min",
             "threshold": -0.32, "value": -0.62,
             "found": {"metric": "recall", "label": "churned", "own": 0.1, "other": 0.65}},
            "Recall of the class churned is 0.1000, and 0.6500 for the champion; it may be up to "
            "0.62 lower, but only 0.32 is allowed (gate.champion.class_margin).",
        ),
        ({"metric": "labelled", "value": 1, "threshold": 1, "bound": "min", "passed": True},
         "The number of labels equals the number of outputs."),
        (
            {"metric": "comparable", "value": 0, "note": "it uses x, but this model y"},
            "The champion cannot be compared with this model: it uses x, but this model y.",
        ),
        (
            {"metric": "difference of tflite", "value": 0.065, "threshold": 0.01, "bound": "max",
             "key": "its tolerance"},
            "The largest difference between the exported tflite model and the checkpoint is 0.065; "
            "it must be at most 0.01 (its tolerance).",
        ),
        (
            {"metric": "megabytes", "value": 12.34567, "threshold": 9.0, "bound": "max",
             "key": "registry.max_megabytes"},
            "The size of the model in megabytes is 12.35; it must be at most 9 "
            "(registry.max_megabytes).",
        ),
    ],
)  # fmt: skip
def test_rules_are_sentences(rule: dict[str, Any], text: str) -> None:
    assert rules.sentence(rule) == text


def test_a_rule_says_what_the_examples_leave_open() -> None:
    text = rules.sentence({**RULE, "value": 0.97777}, {"accuracy": [0.9567, 0.9886]})
    assert text.startswith("Accuracy is 0.978, between 0.957 and 0.989 at 95 %; it must be")


_ANY = st.none() | st.floats() | st.text() | st.integers()
_FOUND = st.dictionaries(
    st.sampled_from(
        ["metric", "own", "other", "opponent", "label", "answer", "examples", "needed"]
    ),
    _ANY,
)
_NAMES = ["metric", "key", "bound", "threshold", "value", "passed", "note"]
_MORE: list[dict[str, Any]] = [
    {}, {"key": MARGIN}, {"key": CONSTANT, "bound": "max"}, {"metric": "labelled"},
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(_NAMES), _ANY), st.sampled_from(_MORE), _FOUND)
def test_whatever_a_rule_holds_it_is_a_sentence(
    rule: dict[str, Any], more: dict[str, Any], found: dict[str, Any]
) -> None:
    assert rules.sentence({**rule, **more, "found": found}).endswith(".")
    assert rules.because({**rule, **more, "found": found})


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({**RULE, "value": 0.9}, "accuracy is below 0.95"),
        ({**RULE, "bound": "max", "value": 0.99}, "accuracy is above 0.95"),
        ({**RULE, "value": None}, "accuracy is not a finite number"),
        ({**MARGINAL, "value": -0.05}, "it may be worse than the champion"),
        ({**MARGINAL, "threshold": 0.01, "value": 0}, "it may be no better than the champion"),
        ({"metric": "auc_over_constant", "key": CONSTANT}, "it does not beat a constant"),
        ({"metric": "comparable"}, "the champion cannot be compared with this model"),
        ({"metric": "recall", "key": CLASS_MARGIN, "found": {"label": "a"}},
         "it may find fewer examples of the class a than the champion"),
    ],
)  # fmt: skip
def test_a_refusal_has_a_short_reason(rule: dict[str, Any], text: str) -> None:
    assert rules.because(rule) == text
