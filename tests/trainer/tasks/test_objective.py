"""Metrics are read from sums, whatever their `result` returns."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.trainer.tasks.measuring import InParts, target
from trainer.tasks.objective import Objective
from trainer.tasks.regression import Regression


class Seen(keras.Metric):
    """Counts examples, and returns its variables as they are."""

    def __init__(self, name="seen"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        del y_true, sample_weight
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return {"seen": self.count, "twice": 2 * self.count}


def test_a_metric_that_returns_its_variable_has_its_value():
    labels = np.arange(20, dtype="float32")
    objective = Objective(Regression(target(labels)), metrics=[f"{__name__}:Seen"])
    parts = InParts(labels, labels[:, np.newaxis]).parts()
    found = objective.means(np.sum([objective.sums(part) for part in parts], axis=0))
    assert (found["seen"], found["twice"]) == (20, 40)


def turned(_labels, predictions):
    def turn(row):
        if row[0] > 0:
            return row
        return -row

    return tf.map_fn(turn, tf.reshape(predictions, [-1, 1]))[:, 0]


def test_what_a_metric_maps_over_examples_may_branch():
    labels = np.arange(4, dtype="float32")
    objective = Objective(Regression(target(labels)), metrics=[f"{__name__}:turned"])
    (part,) = InParts(labels, np.float32([[-1], [2], [-3], [4]])).parts()
    assert objective.means(objective.sums(part))["turned"] == 2.5
