"""Tests that padded positions without a label are ignored everywhere."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn import metrics as scores

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.sequences import SequenceLabelling, SequenceToLabel
from tests.trainer.tasks.measuring import InParts, check_validation, evaluated, measured, target

COUNT, PLACES, CLASSES = 20, 6, 3


def case():
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, (COUNT, PLACES))
    lengths = random.integers(1, PLACES + 1, COUNT)
    labels[np.arange(PLACES) >= lengths[:, np.newaxis]] = -1
    outputs = random.normal(size=(COUNT, PLACES, CLASSES)).astype("float32")
    outputs += 2 * np.eye(CLASSES, dtype="float32")[np.maximum(labels, 0)]
    task = SequenceLabelling(target(labels, num_classes=CLASSES, labels=("a", "b", "c")))
    return task, labels, outputs


@pytest.mark.parametrize("weighted", [False, True])
def test_a_validation_finds_what_an_evaluation_finds(weighted):
    check_validation(*case(), weighted=weighted)


def test_the_loss_of_an_example_is_that_of_its_places():
    task, labels, outputs = case()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    each = [loss(t[t >= 0], o[t >= 0]) for t, o in zip(labels, outputs, strict=True)]
    np.testing.assert_allclose(task.example_losses(labels, outputs), each, rtol=1e-5)
    weights = np.random.default_rng(2).uniform(size=COUNT).astype("float32")
    found = measured(task, InParts(labels, outputs, weights))["loss"]
    assert found == pytest.approx(np.mean(np.array(each) * weights), rel=1e-4)


def net(size, dimension, **embedding):
    keras.utils.set_random_seed(0)
    given = keras.Input((PLACES,), dtype="int64")
    x = keras.layers.Embedding(size, dimension, **embedding)(given)
    return keras.Model(given, keras.layers.Dense(CLASSES)(x))


def test_the_mask_of_an_embedding_leaves_its_places_out_of_the_loss():
    task, labels, _ = case()
    tokens = np.where(labels >= 0, labels + 1, 0)
    model, objective = net(CLASSES + 1, 4, mask_zero=True), Objective(task)
    objective.accept(model, model.output)
    outputs = model(tokens)
    masked = objective.loss(model, (tokens, np.maximum(labels, 0)), outputs)
    by_label = objective.loss(model, (tokens, labels), tf.identity(outputs))
    np.testing.assert_allclose(masked, by_label, rtol=1e-6)
    np.testing.assert_allclose(by_label, task.example_losses(labels, outputs.numpy()).mean(), 1e-5)


def test_classes_of_places_may_weigh():
    task, labels, outputs = case()
    table = np.array([2.0, 1.0, 0.5], "float32")
    model, objective = net(9, 2), Objective(task, weights={"": table})
    objective.accept(model, model.output)
    found = objective.loss(model, (np.zeros((COUNT, PLACES)), labels), tf.constant(outputs))
    each = keras.ops.sparse_categorical_crossentropy(np.maximum(labels, 0), outputs, True).numpy()
    known = labels >= 0
    weighed = each * known * table[np.maximum(labels, 0)]
    expected = (weighed.sum(axis=1) / known.sum(axis=1)).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_what_is_said_besides_the_metrics_is_plain_data():
    task, labels, outputs = case()
    details = evaluated(task, InParts(labels, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    known = labels >= 0
    matrix = scores.confusion_matrix(labels[known], outputs.argmax(axis=2)[known])
    assert details["confusion_matrix"] == matrix.tolist()
    row = task.described(np.array([0, 2, -1]), np.eye(3)[[0, 1, 1]])
    assert row == {"label": "a c", "predicted": "a b", "accuracy": 0.5}


@pytest.mark.parametrize(
    ("shape", "outputs"), [((6,), (6, 3)), ((8, 8, 1), (8, 8, 3)), ((8, 8), (8, 8, 3))]
)
def test_an_output_has_logits_for_each_place(shape, outputs):
    found = SequenceLabelling(Target(name="y", shape=shape, dtype="uint8", num_classes=3))
    assert found.output_shape == outputs


def test_a_whole_sequence_has_one_row_of_logits():
    task = SequenceToLabel(Target(name="y", shape=(), dtype="int64", num_classes=3))
    task.check_output(keras.KerasTensor((None, 3)), None)
    with pytest.raises(ConfigError, match="or set task"):
        task.check_output(keras.KerasTensor((None, 6, 3)), None)


def test_what_cannot_be_labelled_is_refused():
    with pytest.raises(ConfigError, match="the label must be a class number for each position"):
        SequenceLabelling(Target(name="y", shape=(6,), dtype="float32"))
    counts = {"train": [1, 1], "test": [0, 0]}
    found = Target(name="y", shape=(6,), dtype="int64", counts=counts)
    with pytest.raises(ConfigError, match="the split 'test' has no label of 'y'"):
        SequenceLabelling(found).check()
