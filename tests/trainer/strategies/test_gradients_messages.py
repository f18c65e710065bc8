"""Values that travel together arrive as they were sent."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.strategies.gradients import Messages, pull, push_state
from trainer.strategies.parameter_server import looks_up

SHAPES = ((2, 3), (4,), (), (1, 2, 2))


def numbers(shape, begin=0.0):
    return np.arange(begin, begin + np.prod(shape, dtype=int)).reshape(shape)


@pytest.fixture
def variables():
    """Variables of several shapes, of two types."""
    found = [tf.Variable(numbers(shape), dtype=tf.float32) for shape in SHAPES]
    return [*found, *(tf.Variable(numbers(shape), dtype=tf.int64) for shape in SHAPES)]


def operations(function, kind):
    graph = tf.function(function).get_concrete_function().graph
    return [each for each in graph.get_operations() if each.type == kind]


def test_pulled_values_are_those_of_the_variables(variables):
    for value, variable in zip(Messages(variables).pulled(), variables, strict=True):
        assert (value.dtype, value.shape) == (variable.dtype, variable.shape)
        np.testing.assert_array_equal(value, variable)


def test_pushed_values_are_those_that_were_sent(variables):
    sent = [tf.cast(numbers(v.shape, 7.0), v.dtype) for v in variables]
    for value, given in zip(Messages(variables).pushed(sent), sent, strict=True):
        assert (value.dtype, value.shape) == (given.dtype, given.shape)
        np.testing.assert_array_equal(value, given)


def test_there_is_one_message_for_each_type(variables):
    messages = Messages(variables)
    assert len(operations(messages.pulled, "ConcatV2")) == 2
    assert len(operations(lambda: messages.pushed(messages.pulled()), "ConcatV2")) == 4


def test_there_is_one_message_for_each_device():
    devices = [f"/job:localhost/replica:0/task:0/device:CPU:{index}" for index in (0, 0, 1, 1)]
    graph = tf.Graph()
    with graph.as_default():
        made = []
        for device in devices:
            with tf.device(device):
                made.append(tf.Variable([1.0, 2.0]))
        messages = Messages(made)
        with tf.device("/job:worker/device:CPU:0"):
            messages.pushed(messages.pulled())
    packed = [each for each in graph.get_operations() if each.type == "ConcatV2"]
    assert [each.device for each in packed[:2]] == [devices[0], devices[2]]
    assert {each.device for each in packed[2:]} == {"/job:worker/device:CPU:0"}
    parts = [each.device for each in graph.get_operations() if each.type == "SplitV"]
    assert parts.count("/job:worker/device:CPU:0") == 2
    assert {devices[0], devices[2]} <= set(parts)


def test_a_gradient_of_half_precision_is_pushed_in_the_type_of_its_variable():
    variable = tf.Variable([1.0, 2.0])
    (value,) = Messages([variable]).pushed([tf.constant([0.5, 0.25], tf.bfloat16)])
    assert value.dtype == tf.float32
    np.testing.assert_array_equal(value, [0.5, 0.25])


def test_nothing_travels_of_no_variables():
    messages = Messages([])
    assert messages.pulled() == []
    assert messages.pushed([]) == []


def test_state_that_has_not_moved_is_not_pushed():
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization()])
    frozen, moving = model.non_trainable_variables[:2]

    def push():
        before = pull(model).state
        after = [before[0], *(value + 1 for value in before[1:])]
        push_state(model.non_trainable_variables, before, after)

    tf.function(push)()
    np.testing.assert_array_equal(frozen, np.zeros(3))
    np.testing.assert_array_equal(moving, np.full(3, 2.0))
    kinds = ("AssignAddVariableOp", "AssignVariableOp")
    assigned = sum(len(operations(push, kind)) for kind in kinds)
    assert assigned == len(model.non_trainable_variables) - 1


class Rows(keras.layers.Layer):
    """A layer of a user that takes rows of a table."""

    looks_up = True

    def call(self, inputs):
        return inputs


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (keras.layers.Dense(2), False),
        (keras.layers.Embedding(5, 2), True),
        (ShardedEmbedding(5, 2), True),
        (Rows(), True),
        (keras.layers.SpectralNormalization(keras.layers.Dense(2)), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_that_take_rows_are_known(layer, expected):
    inner = keras.Sequential([layer])
    assert looks_up(keras.Sequential([keras.layers.Flatten(), inner])) is expected
