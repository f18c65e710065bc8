"""Tests comparisons with the best constant of each task, and with the simple models."""

import numpy as np
import pytest

from flotilla.trainer.baselines.baselines import Answers, Baseline
from flotilla.trainer.evaluation import baselines
from flotilla.trainer.evaluation.predictions import measure_predictions
from flotilla.trainer.report import headline, report
from flotilla.trainer.tasks.areas import areas
from flotilla.trainer.tasks.base import Part, Whole
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
    Threshold,
)
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.ranking import Ranking
from flotilla.trainer.tasks.recommendation import Recommendation
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import InParts, target

COUNT = 600
DRAW = np.random.default_rng(5)
RARE = (DRAW.random(COUNT) < 0.1).astype("int64")
CLASS = DRAW.choice(4, COUNT, p=[0.1, 0.6, 0.2, 0.1])
ROWS = (DRAW.random((COUNT, 3)) < [0.7, 0.3, 0.05]).astype("int64")
SKEWED = DRAW.exponential(size=COUNT).astype("float32")
PLACES = np.where(DRAW.random((COUNT, 5)) < 0.2, -1, DRAW.integers(0, 3, (COUNT, 5)))
GROUPS = DRAW.integers(0, 60, COUNT)
ITEMS = DRAW.integers(0, 30, COUNT)
WEIGHTS = DRAW.uniform(0.5, 2, COUNT).astype("float32")
MANY = (DRAW.random(4000) < 0.1).astype("int64")
BEST = baselines._Best(0.5, baselines.Constant("0.1", np.zeros(1)))


def noise(*shape):
    return np.random.default_rng(0).normal(size=(COUNT, *shape)).astype("float32")


def compared(task, labels, outputs, metric="", *, weights=None, columns=None):  # noqa: PLR0913
    objective = Objective(task)
    own = Whole(Part(labels, outputs, weights, columns or {}))
    metrics = measure_predictions(objective, own)["metrics"]
    return baselines.compare_constant(objective, own, metrics, metric or task.main_metric)


def share(values, weights=None):
    return np.average(values, weights=weights)


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_of_two_classes_it_is_the_share_and_the_more_frequent_one(weights):
    task = BinaryClassification(target(RARE, num_classes=2))
    found = compared(task, RARE, noise(1), weights=weights)
    p = share(RARE, weights)
    expected = {
        "accuracy": 1 - p, "auc": 0.5, "average_precision": p, "recall": 1, "precision": p,
        "f1": 2 * p / (1 + p), "brier_score": p * (1 - p), "calibration_error": 0,
        "log_loss": -p * np.log(p) - (1 - p) * np.log(1 - p),
    }  # fmt: skip
    scale = 1 if weights is None else weights.mean()
    assert found["metrics"] == pytest.approx(
        {**expected, "loss": expected["log_loss"] * scale}, abs=1e-5
    )
    assert found["answer"] == "always '0'"


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_of_classes_it_is_the_most_frequent_one_or_their_shares(weights):
    task = Classification(target(CLASS, num_classes=4))
    found = compared(task, CLASS, noise(4), weights=weights)
    shares = np.array([share(each == CLASS, weights) for each in range(4)])
    assert found["answer"] == "always '1'"
    assert found["metrics"]["accuracy"] == pytest.approx(shares[1], abs=1e-6)
    assert found["metrics"]["macro_auc"] == 0.5
    assert found["metrics"]["macro_average_precision"] == pytest.approx(0.25)
    assert found["metrics"]["macro_recall"] == pytest.approx(0.25)
    entropy = -(shares * np.log(shares)).sum() * (1 if weights is None else weights.mean())
    assert found["metrics"]["loss"] == pytest.approx(entropy, rel=1e-5)


def test_of_a_row_of_classes_it_is_all_the_frequent_ones_or_the_commonest_row():
    task = MultilabelClassification(target(ROWS))
    found = compared(task, ROWS, noise(3))
    p = ROWS.mean(axis=0)
    _, counts = np.unique(ROWS, axis=0, return_counts=True)
    micro = max(2 * p[:j].sum() / (p.sum() + j) for j in (1, 2, 3))
    expected = {
        "subset_accuracy": counts.max() / COUNT,
        "macro_f1": np.mean(2 * p / (1 + p)),
        "micro_f1": micro,
        "binary_accuracy": np.maximum(p, 1 - p).mean(),
        "macro_auc": 0.5,
        "macro_average_precision": p.mean(),
    }
    assert {name: found["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("weights", "standardize"), [(None, True), (WEIGHTS, False)])
def test_of_numbers_it_is_the_mean_or_the_median(weights, standardize):
    task = Regression(target(SKEWED), standardize=standardize)
    found = compared(task, SKEWED, noise(1), weights=weights)
    mean = share(SKEWED, weights)
    errors = [share(np.abs(SKEWED - each), weights) for each in SKEWED]
    expected = {
        "mean_absolute_error": min(errors),
        "mean_squared_error": share((SKEWED - mean) ** 2, weights),
        "r2_score": 0,
    }
    assert {name: found["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-5)
    answer = float(found["answer"].removeprefix("always "))
    assert share(np.abs(SKEWED - answer), weights) == pytest.approx(min(errors), abs=1e-3)


def test_of_places_it_is_the_most_frequent_class_of_each():
    task = SequenceLabelling(target(PLACES, num_classes=3))
    found = compared(task, PLACES, noise(5, 3))
    best = [np.bincount(column[column >= 0]).max() for column in PLACES.T]
    assert found["metrics"]["accuracy"] == pytest.approx(sum(best) / (PLACES >= 0).sum(), abs=1e-6)


def test_of_a_recommender_it_is_what_most_took_in_the_training():
    task = Recommendation(target(RARE, num_classes=2), group="user", item="item", k=[5])
    popular = np.random.default_rng(9).permutation(30)
    taken = (popular[ITEMS] >= 20).astype("int64")
    task.learn([{"item": ITEMS, "taken": taken, task.target.name: taken}] * 3)
    columns = {"user": GROUPS, "item": ITEMS}
    found = compared(task, taken, noise(5), "ndcg", columns=columns)
    assert found["answer"] == "the most popular items"
    assert found["paired"]["bound"] < 0
    assert found["metrics"]["ndcg"] == pytest.approx(1)


def test_of_several_outputs_it_is_that_of_each():
    parts = {
        "kind": Classification(target(CLASS, num_classes=4)),
        "size": Regression(target(SKEWED)),
    }
    task = MultiOutput(parts, {"kind": 1.0, "size": 2.0})
    outputs = {"kind": noise(4), "size": noise(1)}
    found = compared(task, {"kind": CLASS, "size": SKEWED}, outputs)
    alone = {
        name: compared(part, labels, outputs[name])["metrics"]
        for (name, part), labels in zip(parts.items(), (CLASS, SKEWED), strict=True)
    }
    for name, metrics in alone.items():
        for metric in metrics.keys() - {"loss"}:
            assert found["metrics"][f"{name}_{metric}"] == pytest.approx(metrics[metric], abs=1e-5)
    loss = alone["kind"]["loss"] + 2 * alone["size"]["loss"]
    assert found["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_query_alone_is_compared_by_its_own_values():
    task = Ranking(target(RARE, num_classes=2), group="query")
    signal = noise(1) + 3 * RARE[:, np.newaxis]
    found = compared(task, RARE, signal.astype("float32"), "ndcg", columns={"query": GROUPS})
    assert found["paired"]["method"] == "t test of paired influences"
    assert found["paired"]["bound"] > 0


@pytest.mark.parametrize("metric", ["auc", "average_precision"])
def test_of_many_examples_some_are_shuffled_and_noise_passes_as_seldom(metric, monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_SHUFFLED", 200)
    monkeypatch.setattr(baselines, "_SHUFFLES", 199)
    best = BEST if metric == "auc" else BEST._replace(value=float(MANY.mean()))
    monkeypatch.setattr(baselines, "_best", lambda *_: {metric: best})
    task = BinaryClassification(target(MANY, num_classes=2))
    objective = Objective(task)

    def passes(outputs):
        own = Whole(Part(MANY, outputs.astype("float32")[:, np.newaxis], None, {}))
        value = getattr(areas(MANY, outputs), metric)
        found = baselines.compare_constant(objective, own, {metric: value}, metric)
        return found["paired"]["bound"] > 0

    generator = np.random.default_rng(2)
    assert sum(passes(generator.normal(size=len(MANY))) for _ in range(20)) <= 1
    assert passes(generator.normal(size=len(MANY)) + MANY)


def test_where_a_rare_class_is_not_among_those_shuffled_it_is_compared_by_example(monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_SHUFFLED", 20)
    labels = np.zeros(400, "int64")
    labels[1:20:2] = 1
    outputs = np.random.default_rng(1).normal(size=(400, 1)).astype("float32") + labels[:, None]
    found = compared(BinaryClassification(target(labels, num_classes=2)), labels, outputs, "auc")
    assert np.isfinite(found["paired"]["bound"])
    assert "influences" in found["paired"]["method"]


FEW, CLASSES = 150, 3
RANDOM = np.random.default_rng(3)
KIND = RANDOM.integers(CLASSES, size=FEW)
SURE = np.eye(CLASSES, dtype="float32")[KIND]


def noisy(much):
    return (SURE + much * RANDOM.normal(size=SURE.shape)).astype("float32")


def judged(monkeypatch, own, *found):
    monkeypatch.setattr(baselines, "fit_baselines", lambda *_: list(found))
    objective = Objective(Classification(target(KIND, num_classes=CLASSES)))
    return baselines.judge_baselines(objective, InParts(KIND, own), None)


@pytest.mark.parametrize(
    ("own", "other", "beats"), [(0.1, 3.0, False), (3.0, 0.1, True), (0.5, 0.5, False)]
)
def test_the_model_is_compared_with_it_on_the_same_examples(monkeypatch, own, other, beats):
    model, simple = noisy(own), noisy(other)
    (found,) = judged(monkeypatch, model, Baseline(name="linear", rows=9, outputs=simple))
    means = [(each.argmax(axis=1) == KIND).mean() for each in (model, simple)]
    assert found["metrics"]["accuracy"] == pytest.approx(means[1])
    paired = found["paired"]
    assert (paired["metric"], paired["examples"]) == ("accuracy", FEW)
    assert paired["difference"] == pytest.approx(means[0] - means[1])
    low, high = paired["interval"]
    assert low < paired["difference"] < high
    assert found["beats"] == beats


def test_one_that_answers_fewer_is_compared_on_those(monkeypatch):
    model, simple = noisy(0.5), noisy(0.5)[:40]
    (found,) = judged(monkeypatch, model, Baseline(name="linear", rows=9, outputs=simple))
    assert found["paired"]["examples"] == 40
    hits = (simple.argmax(axis=1) == KIND[:40]).mean()
    assert found["metrics"]["accuracy"] == pytest.approx(hits)


def test_the_report_says_so_where_the_model_loses_by_more_than_the_interval(monkeypatch):
    made = {"made_by": "m", "rows": 9, "seconds": 3.0}
    strong = Baseline(name="gradient boosting", outputs=noisy(0.1), **made)
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
    yes = (KIND == 0).astype("int64")
    # All of the baseline's probabilities are below 0.5 and below the model's threshold.
    low = (RANDOM.normal(size=(FEW, 1)) + 4 * yes[:, np.newaxis] - 6).astype("float32")
    answers = Answers(yes, low, np.ones(FEW))
    objective = Objective(BinaryClassification(target(yes))).set_thresholds({"": Threshold(0.9)})
    rows = []
    for validation in (None, answers):
        simple = Baseline(name="linear", outputs=low, validation=validation)
        monkeypatch.setattr(baselines, "fit_baselines", lambda *_, found=simple: [found])
        rows += baselines.judge_baselines(objective, InParts(yes, -low), None)
    assert rows[0]["metrics"]["recall"] == 0
    assert rows[1]["metrics"]["f1"] > 0.9
    assert rows[0]["metrics"]["auc"] == rows[1]["metrics"]["auc"]


def test_what_fails_is_skipped(monkeypatch):
    endless = noisy(0.5)
    endless[3] = np.inf
    (found,) = judged(monkeypatch, noisy(0.5), Baseline(name="linear", outputs=endless))
    assert found["skipped"] == "it returns non-finite numbers for 1 examples"
    (found,) = judged(monkeypatch, noisy(0.5), Baseline(name="linear", skipped="no time"))
    assert (found["skipped"], found["metrics"], found["paired"]) == ("no time", {}, {})

    def fails(*_):
        raise MemoryError("no\nmemory")

    monkeypatch.setattr(baselines, "measure_predictions", fails)
    (found,) = judged(monkeypatch, noisy(0.5), Baseline(name="linear", outputs=noisy(0.5)))
    assert found["skipped"].startswith("MemoryError: no (")
    assert (found["metrics"], found["beats"]) == ({}, False)
