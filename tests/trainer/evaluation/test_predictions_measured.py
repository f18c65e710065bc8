"""The metrics of a task over examples in parts: sums of metrics, and what the task adds to them."""

from __future__ import annotations

from contextlib import closing

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.evaluation.test_predictions_unsound import SPEC
from tests.trainer.tasks.measuring import InParts, target
from trainer.evaluation import columns
from trainer.evaluation.predictions import Writer, measured, predict
from trainer.tasks.classification import Classification
from trainer.tasks.objective import Objective
from trainer.tasks.ranking import Ranking
from trainer.tasks.regression import Regression

COUNT, CLASSES = 40, 3
RANDOM = np.random.default_rng(5)
LABELS = RANDOM.integers(CLASSES, size=COUNT)
LOGITS = RANDOM.normal(size=(COUNT, CLASSES)).astype("float32")
WEIGHTS = RANDOM.uniform(size=COUNT).astype("float32")


def classifier() -> Objective:
    return Objective(Classification(target(LABELS, num_classes=CLASSES)))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
def test_parts_are_measured_as_one_whole(weights):
    found = measured(classifier(), InParts(LABELS, LOGITS, weights))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(LABELS, LOGITS, weights)
    assert found["metrics"]["loss"] == pytest.approx(float(loss), rel=1e-5)
    hits = np.average(LOGITS.argmax(axis=1) == LABELS, weights=weights)
    assert found["metrics"]["accuracy"] == pytest.approx(hits, rel=1e-6)


def test_details_of_the_task_come_with_its_metrics():
    objective = classifier()
    examples = InParts(LABELS, LOGITS)
    found, details = measured(objective, examples), objective.task.details(examples)
    # Those of the details are added to the means, and stand only there.
    assert details["metrics"].items() <= found["metrics"].items()
    assert found["intervals"] == details["intervals"]
    others = {"metrics", "intervals"}
    assert found.keys() - others == details.keys() - others


def test_a_task_without_intervals_has_none():
    labels = RANDOM.normal(size=COUNT).astype("float32")
    outputs = labels[:, np.newaxis] + 0.5
    found = measured(Objective(Regression(target(labels))), InParts(labels, outputs))
    assert found["intervals"] == {}
    assert found["metrics"]["mean_absolute_error"] == pytest.approx(0.5, rel=1e-6)


def test_a_metric_of_the_configuration_is_measured_with_those_of_the_task():
    labels = RANDOM.normal(size=COUNT).astype("float32")
    objective = Objective(Regression(target(labels)), metrics=["log_cosh_error"])
    found = measured(objective, InParts(labels, labels[:, np.newaxis]))["metrics"]
    assert found["log_cosh_error"] == pytest.approx(0, abs=1e-6)
    assert set(found) == {*Regression.directions, "log_cosh_error"}


def test_no_text_is_left_out_of_what_the_task_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "MOST_TEXTS", 2)
    users, labels = np.array([f"u{n}".encode() for n in range(8)], object), np.arange(8) % 2
    named = {"user": users, "city": users}
    batches = tf.data.Dataset.from_tensor_slices(((np.ones((8, 1), "float32"), labels), named))
    given = keras.Input((1,))
    model = keras.Model(given, keras.layers.Dense(1)(given))
    objective = Objective(Ranking(target(labels), group="user"))
    with closing(Writer(tmp_path / "predictions", tmp_path / "columns", 8)) as writer:
        found = predict(objective, model, SPEC, batches.batch(3), writer)
    (part,) = found.own.parts()
    assert part.columns["user"].tolist() == users.tolist()
    assert part.columns["city"].tolist() == [b"u0", b"u1", *[columns.OTHER] * 6]
    (queries, *_) = objective.task.details(found.own)["tables"]
    assert queries["rows"][0] == ["all", 8]
