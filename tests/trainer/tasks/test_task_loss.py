"""Weights of classes: those of Keras's `fit`, or from the examples of each class."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.tasks.test_compiled import CLASSES, INPUTS, LABELS, WEIGHTS, net, task
from trainer.errors import ConfigError
from trainer.tasks.base import Target
from trainer.tasks.classification import Classification
from trainer.tasks.objective import Objective
from trainer.tasks.task_loss import class_weights, weights_by_class

KEY = "training.class_weights"
NAMES = ("cat", "dog", "cow")


def of(*counts, labels=NAMES):
    return task(labels=labels, counts={"train": counts})


def test_they_are_those_of_fit():
    weights = {0: 2.0, 1: 0.5, 2: 1.0}
    expected, model = net(), net()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected.compile(keras.optimizers.SGD(1.0), loss)
    expected.train_on_batch(INPUTS, LABELS, class_weight=weights)
    objective = Objective(task(), weights={"": np.array([2.0, 0.5, 1.0], np.float32)})
    objective.attach(model)
    before = model.get_weights()
    with tf.GradientTape() as tape:
        batch = (tf.constant(INPUTS), tf.constant(LABELS))
        value = objective.loss(model, batch, model(INPUTS, training=True))
    gradient = tape.gradient(value, [each.value for each in model.trainable_variables])
    for start, step, end in zip(before, gradient, expected.get_weights(), strict=True):
        np.testing.assert_allclose(start - step, end, atol=1e-6)


def test_they_multiply_the_weights_of_examples():
    weights = weights_by_class(
        np.array([2.0, 0.5, 1.0], np.float32), task(), tf.constant(LABELS), tf.constant(WEIGHTS)
    )
    np.testing.assert_allclose(weights, WEIGHTS * [2.0, 1.0, 0.5, 0.5])


def test_a_validation_knows_none():
    batches = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS)).batch(4)
    model = net()
    found = [
        (objective := Objective(task(), weights=weights)).means(
            objective.totals(model, batches).numpy()
        )
        for weights in (None, {"": np.array([9.0, 9.0, 9.0], np.float32)})
    ]
    assert found[0] == found[1]


class Several(Classification):
    """Stands for several labels of one example."""

    link = "sigmoid"

    def __init__(self):
        super().__init__(Target(name="label", shape=(), dtype="int64", num_classes=CLASSES))
        self.target = Target(name="labels", shape=(CLASSES,), dtype="int64")

    def loss(self):
        return keras.losses.BinaryCrossentropy(from_logits=True)


def test_of_several_labels_each_one_that_an_example_has_weighs():
    labels = tf.constant([[1, 0, 1], [0, 0, 0]])
    table = np.array([4.0, 3.0, 0.5], np.float32)
    found = weights_by_class(table, Several(), labels, tf.constant([1.0, 2.0]))
    np.testing.assert_allclose(found, [[4.0, 1.0, 0.5], [2.0, 2.0, 2.0]])
    objective, model = Objective(Several(), weights={"": table}), net()
    objective.attach(model)
    outputs = tf.constant([[1.0, -1.0, 0.5], [0.0, 2.0, -0.5]])
    expected = np.mean(
        tf.nn.weighted_cross_entropy_with_logits(tf.cast(labels, tf.float32), outputs, table)
    )
    value = objective.loss(model, (tf.constant(INPUTS[:2]), labels), outputs)
    assert float(value) == pytest.approx(expected)


def test_balanced_classes_weigh_the_same_together():
    counts = np.array([2, 8, 10])
    found = class_weights("balanced", of(*counts), KEY)
    np.testing.assert_allclose(found * counts, 20 / 3)
    assert class_weights("balanced", task(), KEY) is None
    assert class_weights("", of(*counts), KEY) is None


def test_classes_are_named_or_numbered():
    np.testing.assert_allclose(class_weights({"dog": 2.0, "2": 3.0}, of(), KEY), [1, 2, 3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dgo": 1.0}, "training.class_weights: there is no class 'dgo'; did you mean 'dog'?"),
        ({"7": 1.0}, "training.class_weights: there is no class '7' (the classes are cat, dog, "),
        ("balanced", "training.class_weights: balanced has no weight for 'dog', of which the tra"),
    ],
)
def test_a_class_that_does_not_exist_is_refused(given, message):
    with pytest.raises(ConfigError) as error:
        class_weights(given, of(5, 0, 1), KEY)
    assert str(error.value).startswith(message)
