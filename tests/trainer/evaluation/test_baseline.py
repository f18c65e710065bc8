"""Tests that baselines are measured by the same code as the model and reported next to it."""

import numpy as np
import pytest

from flotilla.trainer.baselines.baselines import Answers, Baseline
from flotilla.trainer.evaluation import baseline
from flotilla.trainer.report import headline, report
from flotilla.trainer.tasks.classification import BinaryClassification, Classification, Threshold
from flotilla.trainer.tasks.objective import Objective
from tests.trainer.tasks.measuring import InParts, target

COUNT, CLASSES = 150, 3
RANDOM = np.random.default_rng(3)
CLASS = RANDOM.integers(CLASSES, size=COUNT)
SURE = np.eye(CLASSES, dtype="float32")[CLASS]


def noisy(much):
    return (SURE + much * RANDOM.normal(size=SURE.shape)).astype("float32")


def judged(monkeypatch, own, *found):
    monkeypatch.setattr(baseline, "fit_baselines", lambda *_: list(found))
    objective = Objective(Classification(target(CLASS, num_classes=CLASSES)))
    return baseline.judge_baselines(objective, InParts(CLASS, own), None)


@pytest.mark.parametrize(
    ("own", "other", "beats"), [(0.1, 3.0, False), (3.0, 0.1, True), (0.5, 0.5, False)]
)
def test_the_model_is_compared_with_it_on_the_same_examples(monkeypatch, own, other, beats):
    model, simple = noisy(own), noisy(other)
    (found,) = judged(monkeypatch, model, Baseline(name="linear", rows=9, outputs=simple))
    means = [(each.argmax(axis=1) == CLASS).mean() for each in (model, simple)]
    assert found["metrics"]["accuracy"] == pytest.approx(means[1])
    paired = found["paired"]
    assert (paired["metric"], paired["examples"]) == ("accuracy", COUNT)
    assert paired["difference"] == pytest.approx(means[0] - means[1])
    low, high = paired["interval"]
    assert low < paired["difference"] < high
    assert found["beats"] == beats


def test_one_that_answers_fewer_is_compared_on_those(monkeypatch):
    model, simple = noisy(0.5), noisy(0.5)[:40]
    (found,) = judged(monkeypatch, model, Baseline(name="linear", rows=9, outputs=simple))
    assert found["paired"]["examples"] == 40
    hits = (simple.argmax(axis=1) == CLASS[:40]).mean()
    assert found["metrics"]["accuracy"] == pytest.approx(hits)


def test_the_report_says_so_where_the_model_loses_by_more_than_the_interval(monkeypatch):
    strong = Baseline(
        name="gradient boosting", made_by="m", rows=9, seconds=3.0, outputs=noisy(0.1)
    )
    for own, is_said in ((3.0, True), (0.1, False)):
        rows = judged(monkeypatch, noisy(own), strong)
        evaluation = {
            "metrics": {"accuracy": 0.4}, "main_metric": "accuracy", "baselines": rows,
            "directions": {"accuracy": "higher"},
        }  # fmt: skip
        notes = [each for each in headline.make_notes(evaluation, []) if "simple model" in each]
        assert bool(notes) is is_said
        page = report.render({"evaluation": evaluation, "metrics": evaluation["metrics"]})
        assert "gradient boosting" in page.lower()
    assert rows[0]["paired"]["interval"] is not None


def test_one_of_two_classes_decides_by_its_own_threshold(monkeypatch):
    yes = (CLASS == 0).astype("int64")
    # All of the baseline's probabilities are below 0.5 and below the model's threshold.
    low = (RANDOM.normal(size=(COUNT, 1)) + 4 * yes[:, np.newaxis] - 6).astype("float32")
    answers = Answers(yes, low, np.ones(COUNT))
    objective = Objective(BinaryClassification(target(yes))).set_thresholds({"": Threshold(0.9)})
    rows = []
    for validation in (None, answers):
        simple = Baseline(name="linear", outputs=low, validation=validation)
        monkeypatch.setattr(baseline, "fit_baselines", lambda *_, found=simple: [found])
        rows += baseline.judge_baselines(objective, InParts(yes, -low), None)
    assert rows[0]["metrics"]["recall"] == 0
    assert rows[1]["metrics"]["f1"] > 0.9
    assert rows[0]["metrics"]["auc"] == rows[1]["metrics"]["auc"]


def test_what_fails_is_skipped(monkeypatch):
    endless = noisy(0.5)
    endless[3] = np.inf
    (found,) = judged(monkeypatch, noisy(0.5), Baseline(name="linear", outputs=endless))
    assert found["skipped"] == "it returns non-finite numbers for 1 examples"

    def fails(*_):
        raise MemoryError("no\nmemory")

    monkeypatch.setattr(baseline, "measure_predictions", fails)
    (found,) = judged(monkeypatch, noisy(0.5), Baseline(name="linear", outputs=noisy(0.5)))
    assert found["skipped"].startswith("MemoryError: no (")
    assert (found["metrics"], found["beats"]) == ({}, False)


def test_one_that_is_skipped_says_why(monkeypatch):
    (found,) = judged(monkeypatch, noisy(0.5), Baseline(name="linear", skipped="no time"))
    assert (found["skipped"], found["metrics"], found["paired"]) == ("no time", {}, {})
