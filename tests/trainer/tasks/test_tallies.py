"""Tests that an evaluation's metrics equal scikit-learn's for any labels, scores and weights."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special
from sklearn import metrics as scores

from flotilla.trainer.evaluation.predictions import measure_predictions
from flotilla.trainer.evaluation.slices import slice_metrics
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import InParts, target

COUNT, CLASSES = 2000, 5
RANDOM = np.random.default_rng(11)
WEIGHTS = {
    "none": None,
    "of all sizes": 10.0 ** RANDOM.integers(-6, 6, COUNT),
    "many zeros": np.where(RANDOM.random(COUNT) < 0.3, 0, RANDOM.random(COUNT)),
}
for each in ("of all sizes", "many zeros"):
    # Some of these examples are of rare classes.
    WEIGHTS[each][200:204] = 1


def check(task, labels, outputs, weights, expected):
    """Check an evaluation, and a slice without the first 100 examples, against `expected`."""
    given = None if weights is None else weights.astype(np.float32)
    objective = Objective(task)
    part = np.arange(len(labels)) >= 100
    examples = InParts(labels, outputs, given, size=700, part=part)
    whole = measure_predictions(objective, examples)
    rows = slice_metrics(objective, examples, {"part": ()})["part"]
    for found, some in ((whole, np.full(len(labels), True)), (rows[1], part)):
        heavy = some if given is None else some & (given > 0)
        wanted = expected(labels[heavy], outputs[heavy], None if given is None else given[heavy])
        assert wanted.keys() <= found["metrics"].keys()
        for name, value in wanted.items():
            assert found["metrics"][name] == pytest.approx(value, abs=1e-6, rel=1e-6), name
        for name, (low, high) in found["intervals"].items():
            value = found["metrics"][name]
            assert low <= value * (1 + 1e-9) + 1e-9, name
            assert value <= high * (1 + 1e-9) + 1e-9, name
            if task.directions[name] == "lower":
                assert low >= 0, name
            assert high <= 1 or task.directions[name] == "lower", name
            assert np.isfinite([low, high]).all()
    assert set(whole["metrics"]) == set(task.directions)
    # With unequal weights, the loss differs from the weighted mean, and may have no interval.
    assert set(whole["metrics"]) - set(whole["intervals"]) <= {"loss"}
    return whole


BINARY = {
    "rare": (RANDOM.random(COUNT) < 0.002, lambda yes: RANDOM.normal(size=COUNT) + yes - 6),
    "common": (RANDOM.random(COUNT) < 0.4, lambda yes: RANDOM.normal(size=COUNT) + yes),
    "a narrow band": (
        RANDOM.random(COUNT) < 0.01,
        lambda yes: -7 - 1e-4 * RANDOM.random(COUNT) * (1 - 0.3 * yes),
    ),
    "ties": (RANDOM.random(COUNT) < 0.2, lambda yes: np.round(RANDOM.normal(size=COUNT) + yes)),
    "sure": (RANDOM.random(COUNT) < 0.2, lambda _: 40 * RANDOM.normal(size=COUNT)),
    "one answer": (RANDOM.random(COUNT) < 0.2, lambda _: np.full(COUNT, -0.5)),
}


def of_two(labels, outputs, weights):
    logits = outputs[:, 0].astype(np.float64)
    sure, taken = special.expit(logits), logits > 0
    each = np.where(labels, np.logaddexp(0, -logits), np.logaddexp(0, logits))
    weigh = {"sample_weight": weights}
    bins = np.minimum((sure * 15).astype(int), 14)
    heavy = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    away = np.bincount(bins, heavy * (sure - labels))
    return {
        "accuracy": scores.accuracy_score(labels, taken, **weigh),
        "precision": scores.precision_score(labels, taken, zero_division=0, **weigh),
        "recall": scores.recall_score(labels, taken, **weigh),
        "f1": scores.f1_score(labels, taken, **weigh),
        "auc": scores.roc_auc_score(labels, logits, **weigh),
        "average_precision": scores.average_precision_score(labels, logits, **weigh),
        "log_loss": np.average(each, weights=weights),
        "brier_score": scores.brier_score_loss(labels, sure, **weigh),
        "calibration_error": np.abs(away).sum() / heavy.sum(),
    }


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", BINARY)
def test_of_two_classes(case, weights):
    yes, make = BINARY[case]
    yes[[0, 1, 200]] = True
    outputs = make(yes)[:, np.newaxis].astype(np.float32)
    check(BinaryClassification(target(yes)), yes, outputs, WEIGHTS[weights], of_two)


def of_classes(labels, logits, weights):
    wide = logits.astype(np.float64)
    logs = special.log_softmax(wide, axis=1)
    # Round, because sums of the same logits in another order differ slightly.
    chances = logs.round(9)
    guess, weigh = logits.argmax(axis=1), {"sample_weight": weights}
    top = scores.top_k_accuracy_score(labels, wide, k=3, labels=range(CLASSES), **weigh)
    found = {
        "accuracy": scores.accuracy_score(labels, guess, **weigh),
        "top_3_accuracy": top,
        "log_loss": np.average(-logs[np.arange(len(labels)), labels], weights=weights),
    }
    for average in ("macro", "weighted"):
        each = scores.precision_recall_fscore_support(
            labels, guess, average=average, zero_division=0, **weigh
        )
        names = (f"{average}_{name}" for name in ("precision", "recall", "f1"))
        found |= dict(zip(names, each[:3], strict=True))
    areas = {"auc": scores.roc_auc_score, "average_precision": scores.average_precision_score}
    for name, score in areas.items():
        each = [score(labels == one, chances[:, one], **weigh) for one in np.unique(labels)]
        found[f"macro_{name}"] = np.mean(each)
    return found


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("even", "none"),
        ("rare", "many zeros"),
        ("one is missing", "none"),
        ("ties", "of all sizes"),
        ("far from zero", "of all sizes"),
    ],
)
def test_of_classes(case, weights):
    shares = {"rare": [0.6, 0.3, 0.09, 0.009, 0.001], "one is missing": [0.4, 0.3, 0.2, 0.1, 0]}
    labels = RANDOM.choice(CLASSES, COUNT, p=shares.get(case, [0.2] * 5))
    labels[200:204] = range(4)
    logits = RANDOM.normal(size=(COUNT, CLASSES)) + 1.5 * np.eye(CLASSES)[labels]
    logits = {"ties": logits.round(), "far from zero": logits + 1e6}.get(case, logits)
    task = Classification(target(np.arange(CLASSES), num_classes=CLASSES))
    found = check(task, labels, logits.astype(np.float32), WEIGHTS[weights], of_classes)
    assert len(found["per_class"]) == CLASSES


def of_labels(labels, logits, weights):
    taken, weigh = logits > 0, {"sample_weight": weights}
    found = {
        "subset_accuracy": scores.accuracy_score(labels, taken, **weigh),
        "binary_accuracy": np.average((labels == taken).mean(axis=1), weights=weights),
        "macro_f1": scores.f1_score(labels, taken, average="macro", **weigh),
        "macro_auc": scores.roc_auc_score(labels, logits, **weigh),
        "macro_average_precision": scores.average_precision_score(labels, logits, **weigh),
    }
    for name in ("precision", "recall", "f1"):
        score = getattr(scores, f"{name}_score")
        found[f"micro_{name}"] = score(labels, taken, average="micro", **weigh)
    return found


@pytest.mark.parametrize("weights", WEIGHTS)
def test_of_several_labels(weights):
    labels = RANDOM.random((COUNT, CLASSES)) < [0.5, 0.3, 0.2, 0.1, 0.01]
    labels[200:204] = np.eye(4, CLASSES)[:4] > 0
    labels[200, 4] = True
    logits = (RANDOM.normal(size=labels.shape) + labels - 0.5).astype(np.float32)
    check(MultilabelClassification(target(labels)), labels, logits, WEIGHTS[weights], of_labels)


def of_numbers(labels, outputs, weights):
    rows = labels.reshape(len(labels), -1).astype(np.float64)
    given, weigh = outputs.astype(np.float64), {"sample_weight": weights}
    names = ("mean_absolute_error", "mean_squared_error", "root_mean_squared_error", "r2_score")
    found = {name: getattr(scores, name)(rows, given, **weigh) for name in names}
    return {**found, "root_mean_squared_error": found["mean_squared_error"] ** 0.5}


@pytest.mark.parametrize(
    ("numbers", "offset", "weights"),
    [(1, 0, "of all sizes"), (1, 1e6, "none"), (3, -1e6, "many zeros")],
)
def test_of_numbers(numbers, offset, weights):
    labels = offset + RANDOM.normal(size=(COUNT, numbers)) * [1, 10, 100][:numbers]
    outputs = (labels + RANDOM.normal(size=labels.shape)).astype(np.float32)
    labels = labels if numbers > 1 else labels[:, 0]
    check(Regression(target(labels)), labels, outputs, WEIGHTS[weights], of_numbers)


@pytest.mark.parametrize("away", [0, 1])
def test_of_equal_numbers_nothing_is_explained_unless_all_are_met(away):
    labels = np.full(50, 1e6 + 1 / 3)
    task = Regression(target(np.arange(3.0)))
    found = measure_predictions(Objective(task), InParts(labels, labels[:, np.newaxis] + away))
    assert found["metrics"]["r2_score"] == 1 - away


def of_places(labels, outputs, weights):
    known, taken = labels >= 0, outputs.argmax(axis=-1)
    heavy = np.ones(len(labels)) if weights is None else weights
    each = np.broadcast_to(heavy[:, np.newaxis], labels.shape)[known]
    right = (~known | (labels == taken)).all(axis=1)
    pair = labels[known], taken[known]
    return {
        "accuracy": scores.accuracy_score(*pair, sample_weight=each),
        "macro_f1": scores.f1_score(*pair, average="macro", sample_weight=each),
        "example_accuracy": np.average(right, weights=weights),
    }


@pytest.mark.parametrize("weights", WEIGHTS)
def test_of_places(weights):
    labels = RANDOM.integers(0, 3, (COUNT, 4))
    outputs = RANDOM.normal(size=(COUNT, 4, 3)) + 2 * np.eye(3)[labels]
    labels[RANDOM.random(labels.shape) < 0.3] = -1
    task = SequenceLabelling(target(np.maximum(labels, 0), num_classes=3))
    check(task, labels, outputs.astype(np.float32), WEIGHTS[weights], of_places)
