"""Tests which functions AutoGraph, which is slow, converts."""

import re
import tempfile
from functools import partial

import keras
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.strategies.async_parameter_server import AsyncParameterServer, Turns
from flotilla.trainer.strategies.gradients import build_pulled_gradient
from flotilla.trainer.strategies.strategy import build_gradient, create
from tests.trainer.plain import CHIEF, NOBODY, problem_of

NUMBERS = tf.data.Dataset.counter()


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Return a function that lists the functions that AutoGraph has converted."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # AutoGraph caches converted functions.
    monkeypatch.setattr(api, "_TRANSPILER", type(api._TRANSPILER)())

    def names():
        files = [each.read_text() for each in tmp_path.glob("__autograph_generated_file*.py")]
        return {re.search(r"def tf__(\w+)|ag__.FunctionScope\('(\w+)'", each)[1] for each in files}

    return names


def test_it_is_seen_what_is_converted(converted):
    @tf.function
    def positive(number):
        return number if number > 0 else -number

    assert int(positive(tf.constant(-2))) == 2
    assert converted() == {"positive"}


def test_of_a_step_the_loop_is_converted(converted):
    training = {"strategy": "single", "accumulate": 2}
    strategy = create(parse_config({"training": training}), NOBODY, CHIEF)
    strategy.build(problem_of()(0))
    strategy.run(2)
    assert converted() == {"run_steps"}


def test_of_turns_nothing_is_converted(converted, tmp_path, monkeypatch):
    (tmp_path / "number.txt").write_text("0")
    monkeypatch.chdir(tmp_path)
    applied = tf.Variable(0, dtype=tf.int64)
    strategy = object.__new__(AsyncParameterServer)
    strategy._turns = Turns(1, applied)
    strategy._turns.deal(3)

    def update(iterator):
        applied.assign_add(1)
        return tf.cast(next(iterator), tf.float32)

    loop = strategy._loop(update, 2)
    loop(iter(NUMBERS), tf.constant(0, tf.int64))
    assert int(applied) == 6
    assert strategy._turns.look().taken == 3
    assert not converted()


def turned(row):
    if tf.reduce_sum(row) > 0:
        return row
    return -row


class Turned(keras.layers.Layer):
    """Rotates each example separately, with a branch on a tensor."""

    def call(self, inputs):
        return tf.map_fn(turned, inputs)


def loss(_model, _batch, outputs):
    return tf.reduce_sum(tf.map_fn(turned, outputs))


@pytest.mark.parametrize(
    ("make", "jit"), [(build_gradient, True), (partial(build_pulled_gradient, parts=2), False)]
)
def test_what_a_model_and_a_loss_map_over_examples_is_converted(make, jit):
    twice = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(2))
    model = keras.Sequential([keras.Input((1,)), Turned(), twice])
    batch = tf.constant([[-1.0], [2.0]])
    stack = (batch if make is build_gradient else tf.stack([batch, batch]),)
    value, _ = tf.function(make(model, loss, jit=jit), autograph=False)(stack)
    assert float(value) == 6.0
