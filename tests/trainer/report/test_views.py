"""Tests how an evaluation is displayed on the page of a run."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from flotilla.trainer.evaluation.evaluate import summarize_predictions
from flotilla.trainer.evaluation.predictions import Predictions, Worst
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.report import report, views
from flotilla.trainer.tasks.classification import Classification
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.registry import find_target
from tests.trainer.page import Page
from tests.trainer.tasks.measuring import InParts

EVIL = "<img src=x onerror=alert(1)>"
NAMES = ("zero", EVIL, "two")
STEPS = [
    {"step": "prepare_data", "status": "done", "seconds": 10.0, "began": 100.0, "metrics": {}},
    {"step": "train_model", "status": "failed", "seconds": 30.0, "began": 120.0, "metrics": {}},
]
CHAMPION = {
    "uri": "file:///c", "incomparable": "", "metrics": {"accuracy": 0.5},
    "paired": {
        "metric": "accuracy", "better": "higher", "confidence": 0.95, "examples": 200,
        "difference": 0.05, "bound": 0.003, "method": "Tango's score interval",
        "pairs": {
            "both_right": 90, "only_challenger_right": 20, "only_champion_right": 10,
            "both_wrong": 80,
        },
    },
}  # fmt: skip


def pictures_of(folder):
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(path.read_bytes()).decode()
        for path in folder.rglob("*.png")
    }


def evaluation_of(folder, names, given):
    """Return `metrics.json` for images, labels and logits, and its curves."""
    images, labels, logits = given
    digit = FeatureSpec(
        shape=(), dtype="int64", stored="int", num_classes=len(names), labels=tuple(names)
    )
    image = FeatureSpec(shape=images.shape[1:], dtype="uint8", stored="raw")
    spec = DatasetSpec(
        features={"image": image, "digit": digit}, inputs=("image",), targets=("digit",), shards={}
    )
    objective = Objective(Classification(find_target(spec, "digit")))
    worst = Worst(spec, objective.task)
    own = InParts(labels, logits, digit=labels)
    worst.look({"image": images}, own.whole)
    found = Predictions(own=own, champion=None, unsound=(0, 0), worst=worst)
    summary = summarize_predictions(spec, objective, found, ("digit",))
    evaluation = {**summary, "worst": worst.write(folder)}
    return evaluation, evaluation.pop("curves")


@pytest.fixture(scope="module")
def predicted():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 200)
    logits = generator.normal(size=(200, 3)).astype(np.float32)
    logits[np.arange(200), labels] += 1
    return labels, logits


@pytest.fixture(scope="module")
def facts(predicted, tmp_path_factory):
    labels, logits = predicted
    folder = tmp_path_factory.mktemp("evaluation")
    images = np.zeros((200, 4, 4, 1), np.uint8)
    evaluation, curves = evaluation_of(folder, NAMES, (images, labels, logits))
    evaluation["champion"] = CHAMPION
    return {
        "run_id": "r", "verdict": "blessed", "steps": STEPS, "tries": STEPS,
        "evaluation": evaluation,
        "metrics": evaluation["metrics"], "curves": curves,
        "pictures": pictures_of(folder), "lineage": {"commit": "abc"}, "cost": {"task_hours": 0.5},
        "registered": {"decision": "promoted", "version": 4, "promotion": 5, "rules": []},
        "checkpoints": [{"event": "checkpoint_published", "time": 125.0}],
        "incidents": [{"event": "restart", "time": 140.0, "task": "worker-1"}],
    }  # fmt: skip


def test_the_page_shows_all_of_it(facts):
    page = Page(report.render(facts))
    for head in [
        "Test metrics", "Next to the champion", "Time line", "Confusion matrix", "Curves",
        "Weakest parts by digit", "Worst examples", "Steps and lineage", "task hours", "commit",
    ]:  # fmt: skip
        assert head in page.words
    assert "version 4" in page.text
    assert "this model alone\n20" in page.text
    assert page.tags.count("svg") == 3
    assert page.tags.count("img") == 25


def test_every_picture_has_a_text_and_comes_with_the_page(facts):
    page = Page(report.render(facts))
    sources = [value for name, value in page.attributes if name == "src"]
    assert len(sources) == 25
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    texts = [value for name, value in page.attributes if name in ("alt", "aria-label")]
    assert len(texts) == 25 + 3 + 2, "charts, time line and contents"
    assert all(texts)


def test_names_of_classes_are_escaped(facts):
    html = report.render(facts)
    assert EVIL not in html
    assert not [name for name, _ in Page(html).attributes if name.startswith("on")]


def test_facts_are_plain_data(facts):
    assert report.render(json.loads(json.dumps(facts))) == report.render(facts)


def test_any_part_of_an_evaluation_may_be_missing(facts):
    for part in ("champion", "calibration", "slices", "confusion_matrix", "worst", "intervals"):
        rest = {name: value for name, value in facts["evaluation"].items() if name != part}
        Page(report.render({**facts, "evaluation": rest}))


def test_a_champion_that_cannot_be_asked(facts):
    champion = {"uri": "file:///c", "incomparable": "it knows 9 classes"}
    evaluation = {**facts["evaluation"], "champion": champion}
    page = Page(report.render({**facts, "evaluation": evaluation}))
    assert "The champion cannot be compared: it knows 9 classes." in page.words


def test_a_champion_by_a_metric_that_no_example_is_right_by(facts):
    paired = {name: each for name, each in CHAMPION["paired"].items() if name != "pairs"}
    metrics = {"metric": "pinball", "difference": None, "method": "paired bootstrap-t"}
    champion = {**CHAMPION, "metrics": {}, "paired": {**paired, **metrics}}
    evaluation = {**facts["evaluation"], "champion": champion}
    page = Page(report.render({**facts, "evaluation": evaluation}))
    assert ", by paired bootstrap-t; a higher pinball is better." in page.text
    assert "Who is right" not in page.words


def test_the_matrix_is_shaded_by_the_share_of_its_row():
    found = views.matrix({"confusion_matrix": [[75, 25], [0, 0]]})
    assert [[cell.count for cell in row] for row in found] == [[75, 25], [0, 0]]
    assert [cell.right for cell in found[0]] == [True, False]
    assert found[0][0].shade > found[0][1].shade > found[1][0].shade == 0


def test_many_classes_are_described_by_their_confusions():
    count = views.MOST_CLASSES + 1
    table = [[0] * count for _ in range(count)]
    table[3][5], table[5][3], table[4][4] = 2, 7, 9
    evaluation = {"confusion_matrix": table, "labels": [f"c{n}" for n in range(count)]}
    assert views.matrix(evaluation) == []
    assert views.confusions(evaluation) == [
        {"true": "c5", "predicted": "c3", "count": 7},
        {"true": "c3", "predicted": "c5", "count": 2},
    ]
    page = Page(report.render({"evaluation": evaluation}))
    assert "Most frequent confusions" in page.words


def test_classes_of_each_output_come_under_its_name(facts):
    of_classes = {
        name: facts["evaluation"][name]
        for name in ("confusion_matrix", "labels", "per_class", "calibration")
    }
    outputs = {"digit": {**of_classes, "curves": facts["curves"]}, "ink": {}}
    page = Page(report.render({"evaluation": {"outputs": outputs}}))
    for head in ("Confusion matrix of digit", "By class of digit", "Curves of digit"):
        assert head in page.words
    assert "of ink" not in page.text
    alone = Page(report.render({"evaluation": of_classes, "curves": facts["curves"]}))
    assert page.tags.count("svg") == alone.tags.count("svg")


def test_the_time_line_in_percent_of_the_run():
    incidents = [{"event": "restart", "time": 125.0}, {"event": "attempt_begin"}]
    (prepared, trained), idle = views.time_line(STEPS, incidents)
    assert idle == 0
    assert [(bar.left, bar.width) for bar in (prepared, trained)] == [(0, 20), (40, 60)]
    assert [(mark.left, mark.kind, mark.text) for mark in trained.marks] == [
        (50, "incident", "restart after 25 s")
    ]
    assert prepared.marks == ()


def test_each_try_of_training_has_its_own_events():
    tries = [{"step": "train_model", "seconds": 10.0, "began": each} for each in (100.0, 190.0)]
    events = [{"event": "checkpoint_published", "time": each} for each in (99.0, 105.0, 195.0)]
    (first, second), idle = views.time_line(tries, events)
    assert [bar.step for bar in (first, second)] == ["train_model, try 1", "train_model, try 2"]
    assert [mark.left for mark in first.marks] == [0, 25]
    assert [(mark.left, mark.kind) for mark in second.marks] == [(75, "checkpoint")]
    assert idle == 80, "a gap in which nothing ran is left out"


def test_steps_without_times_have_no_line_and_those_of_no_length_have_one():
    nothing: list[list[dict[str, Any]]] = [[], [{"step": "x"}], [{"began": "x", "seconds": 1}]]
    assert [views.time_line(steps, []) for steps in nothing] == [([], 0.0)] * 3
    (bar,), _ = views.time_line([{"step": "x", "began": 5.0, "seconds": 0.0}], [])
    assert bar.width > 0


def test_every_class_has_its_metrics_the_weakest_first(facts):
    rows = views.weak_classes(facts["evaluation"])
    assert [row["f1"] for row in rows] == sorted(row["f1"] for row in rows)
    words = Page(report.render(facts)).words
    note = "3 of 3, lowest F1 first; each area under a curve is for one class against the rest."
    begin = words.index(note)
    first = [NAMES.index(rows[0]["label"]), f"{rows[0]['precision']:.4g}", str(rows[0]["support"])]
    cells = words[begin + 8 : begin + 15]
    assert [NAMES.index(cells[0]), cells[1], cells[6]] == first


def test_of_many_classes_the_weakest_have_their_metrics():
    each = {"precision": 0.5, "recall": 0.5, "auc": None, "average_precision": None, "support": 0}
    rows = [{"label": f"c{n}", "f1": n / 1000, **each} for n in range(1000)]
    evaluation = {"per_class": rows[::-1], "labels": [row["label"] for row in rows]}
    found = views.weak_classes(evaluation)
    assert [row["label"] for row in found] == [f"c{n}" for n in range(views.MOST_CLASSES)]
    page = Page(report.render({"evaluation": evaluation}))
    assert "20 of 1000, lowest F1 first" in page.text
    assert "c20" not in page.words


REGRESSION = {
    "task": "regression", "main_metric": "mean_absolute_error", "examples": 9,
    "directions": {"loss": "lower", "mean_absolute_error": "lower", "r2_score": "higher"},
    "metrics": {"loss": 2.0, "mean_absolute_error": 1.0, "r2_score": 0.5}, "intervals": {},
    "slices": {
        "age": [
            {"value": "young", "examples": 4, "metrics": {"mean_absolute_error": 0.5}},
            {"value": "old", "examples": 5, "metrics": {"mean_absolute_error": 1.5}},
            {"value": "none", "examples": 0, "metrics": {}},
        ]
    },
    "tables": [{"title": "Quantiles", "columns": ["share", "error"], "rows": [[EVIL, 0.25]]}],
    "charts": [
        {"title": "Residuals", "x": "label", "y": "error", "series": {"mean": [[0, 1], [1, 2]]}}
    ],
    "worst": [{"index": 3, "loss": 2.25, "label": 1.5, "predicted": 3.0, "error": 1.5}],
}  # fmt: skip


def test_a_task_that_is_no_classifier_is_drawn_by_what_it_says():
    history = [
        {"global_step": step, "loss": 1.0, "validation_mean_absolute_error": 1 / (step + 1)}
        for step in range(3)
    ]
    facts = {"evaluation": REGRESSION, "metrics": REGRESSION["metrics"], "history": history}
    html = report.render(facts)
    page = Page(html)
    heads = {"Residuals: error", "Quantiles", "Weakest parts by age", "Mean absolute error"}
    assert heads <= {*page.words}
    assert "accuracy" not in html.lower()
    assert "Label\nPredicted\nLoss\nError\n1.5\n3\n2.25\n1.5" in page.text
    assert EVIL not in html
    first = page.words.index("Mean absolute error")
    assert page.words[first + 1 : first + 4] == ["1.000", "Loss", "2.000"]


def test_the_weakest_parts_have_the_worst_value_whatever_its_direction():
    rows = REGRESSION["slices"]["age"]
    assert [each["value"] for each in views.weakest(REGRESSION, rows)] == ["old", "young"]
    higher = {**REGRESSION, "directions": {"mean_absolute_error": "higher"}}
    assert [each["value"] for each in views.weakest(higher, rows)] == ["young", "old"]


def test_the_worst_examples_are_first_those_that_are_wrong():
    answers = [("no", "no", 3.0), ("yes", "no", 2.0), ("no", "yes", 1.0), ("yes", "yes", 0.5)]
    worst = [{"label": a, "predicted": b, "loss": c} for a, b, c in answers]
    words = Page(report.render({"evaluation": {"worst": worst}})).words
    first = words.index("2 that the model got wrong, the highest loss first.")
    assert words[first + 4 : first + 10] == ["yes", "no", "2", "no", "yes", "1"]
    assert words[first + 10] == "2 that the model got right, with the highest loss"
    assert words[first + 14 :] == ["no", "no", "3", "yes", "yes", "0.5"]


def test_worst_examples_without_a_picture_are_a_table_with_named_columns():
    row = {"index": 3, "loss": 2.0, "label": "no", "predicted": "yes", "inputs": "age 43, job x"}
    worst = [
        {**row, "columns": {"age": 43, "job": EVIL}},
        {**row, "index": 4, "columns": {"age": 7}},
    ]
    html = report.render({"evaluation": {"worst": worst}})
    words = Page(html).words
    first = words.index("Label")
    assert words[first : first + 5] == ["Label", "Predicted", "Loss", "age", "job"]
    assert words[first + 5 : first + 10] == ["no", "yes", "2", "43", EVIL]
    assert EVIL not in html
    # Records of earlier versions have the inputs only as a string.
    old = Page(report.render({"evaluation": {"worst": [row]}}))
    assert "age 43, job x" in old.words


def test_an_incident_is_flagged_between_the_checkpoints_around_it():
    saved = [{"time": 10.0, "global_step": 100}, {"time": 20.0, "global_step": 200}]
    incidents = [
        {"event": "restart", "time": 15.0, "task": "worker-1"},
        {"event": "attempt_begin", "time": 30.0, "global_step": 200},
        {"event": "suspension", "time": 40.0, "is_over": True},
        {"event": "stalled", "time": 5.0},
        {"event": "task_failed", "time": "today"},
    ]
    assert views.flags(incidents, saved) == [
        (150.0, "worker-1: restart"), (200.0, "attempt 2 begins"), (200.0, "resumed"),
    ]  # fmt: skip
    assert views.flags(incidents[:1], []) == []
