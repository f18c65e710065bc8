"""Gradients that wait on servers: dense or of rows, always whole."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from trainer.strategies.gradients import over, plus
from trainer.strategies.sync_parameter_server import Staging

ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.fixture
def variables() -> list[tf.Variable]:
    return [tf.Variable([0.0, 0.0]), tf.Variable(ROWS), tf.Variable(7.0)]


def gradient(scale: float, rows: list[int]) -> list[Any]:
    values = scale * tf.ones([len(rows), 2])
    slices = tf.IndexedSlices(values, tf.constant(rows), tf.constant([3, 2]))
    return [scale * tf.constant([1.0, 2.0]), slices, tf.constant(scale)]


def staged(staging: Staging, number: int, parts: list[Any]) -> None:
    @tf.function
    def put() -> None:
        staging.put(tf.constant(number, tf.int64), parts)

    put()


def taken(staging: Staging, number: int) -> list[Any]:
    @tf.function
    def take() -> list[Any]:
        return staging.take(tf.constant(number, tf.int64))

    return take()


def test_a_gradient_is_taken_by_its_number_as_it_was_put(variables):
    staging = Staging(variables, name="by number")
    staged(staging, 1, gradient(1.0, [0, 2]))
    staged(staging, 2, gradient(3.0, [1]))
    dense, rows, scalar = taken(staging, 2)
    assert dense.numpy().tolist() == [3.0, 6.0]
    assert rows.indices.numpy().tolist() == [1]
    assert rows.values.numpy().tolist() == [[3.0, 3.0]]
    assert rows.dense_shape.numpy().tolist() == [3, 2]
    assert scalar.numpy() == 3.0
    dense, rows, _ = taken(staging, 1)
    assert dense.numpy().tolist() == [1.0, 2.0]
    assert rows.indices.numpy().tolist() == [0, 2]


def test_places_do_not_share_their_gradients(variables):
    one, other = Staging(variables, name="one"), Staging(variables, name="other")
    staged(one, 1, gradient(1.0, [0]))
    staged(other, 1, gradient(2.0, [0]))
    assert taken(one, 1)[0].numpy().tolist() == [1.0, 2.0]
    assert taken(other, 1)[0].numpy().tolist() == [2.0, 4.0]


def test_the_mean_keeps_rows_as_rows():
    sums = map(plus, gradient(1.0, [0, 2]), gradient(3.0, [2]))
    dense, rows, scalar = (over(each, 2) for each in sums)
    assert dense.numpy().tolist() == [2.0, 4.0]
    assert tf.convert_to_tensor(rows).numpy().tolist() == [[0.5, 0.5], [0.0, 0.0], [2.0, 2.0]]
    assert rows.indices.shape == [3]
    assert scalar.numpy() == 2.0
