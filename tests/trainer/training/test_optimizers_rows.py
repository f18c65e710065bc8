"""Gradients of looked up rows: every optimizer does with them what it does with dense ones."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config.load import parse_config
from trainer.config.optimizer import OPTIMIZERS
from trainer.training.optimizers import build_optimizer, each_row_once

ROWS, DIMENSION = 10, 4
VARIANTS = [
    *((name, {}) for name in OPTIMIZERS),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("sgd", {"weight_decay": 0.1}),
    ("rmsprop", {"centered": True, "momentum": 0.5}),
    *(
        (name, {clip: 0.5})
        for name in ("sgd", "adam")
        for clip in ("clipnorm", "global_clipnorm", "clipvalue")
    ),
]


def trained(name, args, *, dense):
    """Return a table and a dense variable after four steps on the same gradients."""
    table = keras.Variable(np.random.RandomState(0).normal(size=(ROWS, DIMENSION)), dtype="float32")
    other = keras.Variable(np.ones((2, 2)), dtype="float32")
    settings = {"name": name, "learning_rate": 0.05, "args": args}
    optimizer = build_optimizer(parse_config({"training": {"optimizer": settings}}).training)
    optimizer.build([table, other])

    @tf.function
    def step(indices, values):
        gradient = tf.IndexedSlices(values, indices, tf.constant([ROWS, DIMENSION]))
        if dense:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply([gradient, values[:2, :2]], [table, other])

    random = np.random.RandomState(1)
    for indices in ([1, 3, 3], [1, 1, 1], [0, 5, 9], [3, 1, 3]):
        step(tf.constant(indices, tf.int64), tf.constant(random.normal(size=(3, 4)), tf.float32))
    return table.numpy(), other.numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args"), VARIANTS, ids=[" ".join([name, *args]) for name, args in VARIANTS]
)
def test_rows_are_moved_as_by_the_dense_gradient(name, args):
    for sparse, dense in zip(
        trained(name, args, dense=False), trained(name, args, dense=True), strict=True
    ):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_clipping_keeps_the_rows(clip):
    training = parse_config(
        {"training": {"optimizer": {"name": "sgd", "args": {clip: 0.5}}}}
    ).training
    given = tf.IndexedSlices(tf.ones((3, 2)), tf.constant([4, 1, 4]), tf.constant([9, 2]))
    (clipped,) = build_optimizer(training)._clip_gradients([given])
    assert sorted(clipped.indices.numpy()) == [1, 4]


def test_the_parts_of_a_row_are_added_up():
    given = tf.IndexedSlices(
        tf.constant([[1.0], [2.0], [4.0]]), tf.constant([7, 2, 7]), tf.constant([9, 1])
    )
    found = each_row_once(given)
    assert dict(zip(found.indices.numpy(), found.values.numpy()[:, 0], strict=True)) == {7: 5, 2: 2}
    np.testing.assert_array_equal(tf.convert_to_tensor(found), tf.convert_to_tensor(given))


def test_other_gradients_stay_what_they_are():
    dense = tf.ones(3)
    assert each_row_once(dense) is dense
    assert each_row_once(None) is None
