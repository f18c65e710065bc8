"""Tests the one-sentence outcome of a run and the notes below it."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer.report import headline
from flotilla.trainer.report.headline import CLASS_MARGIN, CONSTANT, MARGIN

CHURN = {
    "metric": "average_precision", "value": 0.4123, "interval": [0.29, 0.53], "better": "higher",
    "champion": 0.3812, "constant": 0.0301,
}  # fmt: skip
ERROR = {
    "metric": "mean_absolute_error", "value": 46.93, "interval": [45.1, 48.7], "better": "lower",
    "champion": 48.13, "constant": 72.06,
}  # fmt: skip
BEATS = {"metric": "average_precision_over_constant", "key": CONSTANT, "passed": True}
NOT_WORSE = {"metric": "average_precision_difference", "key": MARGIN, "passed": True}
BOUND = {"metric": "accuracy", "key": "gate.min", "bound": "min", "threshold": 0.95, "value": 0.9}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (
            {"version": 2, "verdict": "promoted", "measured": CHURN, "rules": [BEATS, NOT_WORSE]},
            "churn v2: average precision 0.41, +0.03 against the champion, constant 0.03; promoted",
        ),
        (
            {"version": 1, "verdict": "promoted", "measured": {**CHURN, "champion": None},
             "rules": [BEATS]},
            "churn v1: average precision 0.41, constant 0.03; promoted, no bound set",
        ),
        (
            {"verdict": "refused", "measured": {**CHURN, "value": 0.031, "champion": None},
             "rules": [{**BEATS, "passed": False}]},
            "churn: average precision 0.031, constant 0.03; refused: it does not beat a constant",
        ),
        (
            {"verdict": "refused", "measured": {**CHURN, "value": 0.3812},
             "rules": [{**BOUND, "passed": False}, {**NOT_WORSE, "passed": False}]},
            "churn: average precision 0.38, the same as the champion, constant 0.03; refused: "
            "accuracy is below 0.95, and 1 more",
        ),
        (
            {"verdict": "blessed", "measured": ERROR, "rules": [BEATS, NOT_WORSE]},
            "churn: mean absolute error 46.9, 1.2 lower than the champion's, constant 72.1; "
            "blessed",
        ),
        (
            {"verdict": "blessed", "measured": {
                "metric": "auc", "value": 0.96401, "champion": 0.96325, "constant": 0.5}},
            "churn: AUC 0.9640, +0.0008 against the champion, constant 0.5000; blessed",
        ),
        (
            {"verdict": "blessed", "measured": {**CHURN, "champion": 0.4}},
            "churn: average precision 0.41, +0.01 against the champion, constant 0.03; blessed",
        ),
        (
            {"verdict": "blessed", "measured": {**CHURN, "champion": 0.4124}},
            "churn: average precision 0.41, the same as the champion, constant 0.03; blessed",
        ),
        ({"verdict": "failed", "step": "train_model"}, "churn: failed in train_model"),
        ({"verdict": "interrupted"}, "churn: interrupted"),
        ({"verdict": "unchanged"}, "churn: unchanged"),
        ({"verdict": "refused", "step": "validate_data"}, "churn: refused by validate_data"),
        ({"verdict": "done"}, "churn: done"),
        ({"verdict": "done", "measured": {"metric": "cost@k", "value": None}},
         "churn: cost undefined; done"),
        ({"name": "", "verdict": None}, "run: unknown"),
        ({"name": "authorization", "verdict": "done"}, "authorization: done"),
    ],
)  # fmt: skip
def test_a_run_is_one_sentence(facts, text):
    assert headline.headline({"name": "churn", **facts}) == text


_NUMBER = st.none() | st.floats() | st.integers() | st.sampled_from([1e-12, 1e12, -3.0, 0.0])


@given(
    value=_NUMBER,
    champion=_NUMBER,
    constant=_NUMBER,
    interval=st.none() | st.lists(st.floats(), min_size=2, max_size=2),
    better=st.sampled_from(["higher", "lower", None]),
    name=st.text(),
)
def test_any_numbers_make_one_line(name, better, **numbers):
    metrics = {"metric": name, "better": better, **numbers}
    text = headline.headline({"name": name, "verdict": "blessed", "measured": metrics})
    assert "\n" not in text
    assert text.endswith(("; blessed", ": blessed"))


def test_the_main_metric_is_taken_with_those_of_champion_and_constant():
    evaluation = {
        "main_metric": "auc",
        "metrics": {"loss": 0.3, "auc": 0.9},
        "intervals": {"auc": [0.8, 0.95]},
        "champion": {"uri": "file:///c", "metrics": {"auc": math.nan}},
        "constant": {"answer": "always no", "metrics": {"auc": 0.5}},
    }
    assert headline.describe_metric(evaluation) == {
        "metric": "auc", "value": 0.9, "interval": [0.8, 0.95], "better": "higher",
        "champion": None, "constant": 0.5, "positive": [],
    }  # fmt: skip
    older = {"metrics": {"loss": 0.3, "accuracy": 0.97}, "champion": {"incomparable": "x"}}
    assert headline.describe_metric(older)["metric"] == "accuracy"
    assert headline.describe_metric({"metrics": {}}) == {}


def evaluated(**more):
    return {
        "main_metric": "accuracy", "metrics": {"accuracy": 0.97},
        "directions": {"accuracy": "higher"}, "intervals": {"accuracy": [0.9567, 0.9886]}, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("evaluation", "proposed"),
    [
        (evaluated(), "gate.min.accuracy=0.95"),
        (evaluated(intervals={}), "gate.min.accuracy=0.87"),
        (
            evaluated(intervals={}, constant={"metrics": {"accuracy": 0.9}}),
            "gate.min.accuracy=0.96",
        ),
        (evaluated(constant={"metrics": {"accuracy": 0.965}}), "gate.min.accuracy=0.967"),
        (
            {"main_metric": "mae", "metrics": {"mae": 46.9}, "directions": {"mae": "lower"},
             "intervals": {"mae": [45.1, 48.7]}},
            "gate.max.mae=49",
        ),
        (
            {"main_metric": "r2", "metrics": {"r2": -0.3}, "directions": {"r2": "higher"},
             "intervals": {"r2": [-0.41, -0.2]}},
            "gate.min.r2=-0.41",
        ),
    ],
)  # fmt: skip
def test_without_a_bound_one_is_proposed(evaluation, proposed):
    [note] = headline.make_notes(evaluation, [])
    assert note == (
        f"No bound is set: the gate blesses any model. Set one, such as {proposed}, which this "
        "model meets."
    )
    assert not headline.make_notes(evaluation, [BOUND])


def test_notes_say_what_no_rule_refuses():
    evaluation = evaluated(
        constant={
            "paired": {"metric": "accuracy", "better": "higher", "bound": -0.01}, "champion": False,
        },
        remarks=["The model was trained on 3 of the 360 test examples."],
        baselines=[
            {"name": "gradient boosting", "made_by": "scikit-learn", "rows": 2000,
             "of_rows": 90000, "seconds": 2.94, "metrics": {"accuracy": 0.98},
             "beats": True},
            {"name": "linear", "beats": False},
        ],
        champion={
            "remarks": ["The champion was trained on 12 of the 360 test examples."],
            "classes": [{"label": f"c{n}", "examples": n, "judged": False} for n in range(7)],
        },
    )  # fmt: skip
    assert headline.make_notes(evaluation, [NOT_WORSE]) == [
        "The model does not beat a constant in accuracy; gate.constant is set to reported.",
        "The champion does not beat a constant in accuracy on these examples.",
        "A simple model is better: gradient boosting (scikit-learn, 2,000 of 90,000 rows, 2.9 s) "
        "reaches accuracy 0.980, and this model 0.970.",
        "The model was trained on 3 of the 360 test examples.",
        "The champion was trained on 12 of the 360 test examples.",
        "Too few test examples to tell whether recall is lower for these classes: c0 (0), c1 (1), "
        "c2 (2), c3 (3), c4 (4) and 2 more.",
    ]


RULE = {"metric": "accuracy", "key": "gate.min", "bound": "min", "threshold": 0.95}
MARGINAL = {"metric": "accuracy_difference", "key": MARGIN, "bound": "min", "threshold": -0.02}
BOTH = {"metric": "accuracy", "own": 0.953125, "other": 0.9575, "examples": 360}
WORSE_ERROR = {"metric": "mean_absolute_error", "own": 46.93, "other": 44.1}


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
             "value": 3.14, "threshold": 1.0, "found": WORSE_ERROR},
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
def test_rules_are_sentences(rule, text):
    assert headline.sentence(rule) == text


def test_a_rule_says_what_the_examples_leave_open():
    text = headline.sentence({**RULE, "value": 0.97777}, {"accuracy": [0.9567, 0.9886]})
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
def test_whatever_a_rule_holds_it_is_a_sentence(rule, more, found):
    assert headline.sentence({**rule, **more, "found": found}).endswith(".")
    assert headline.because({**rule, **more, "found": found})


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
def test_a_refusal_has_a_short_reason(rule, text):
    assert headline.because(rule) == text
