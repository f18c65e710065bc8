"""AutoGraph, which takes seconds, converts the loops of strategies, and nothing that they call."""

from __future__ import annotations

import re
import tempfile

import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from tests.trainer.plain import CHIEF, NOBODY, problem_of
from trainer.config.load import parse_config
from trainer.strategies.async_parameter_server import AsyncParameterServer
from trainer.strategies.strategy import create
from trainer.strategies.turns import Turns

NUMBERS = tf.data.Dataset.counter()


@pytest.fixture
def converted(tmp_path, monkeypatch):
    """Return a function that names what was converted; AutoGraph writes each to a file."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # What it has converted once it keeps.
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


@pytest.mark.parametrize("accumulate", [1, 3])
def test_of_a_step_the_loop_is_converted(converted, accumulate):
    training = {"strategy": "single", "accumulate": accumulate}
    strategy = create(parse_config({"training": training}), NOBODY, CHIEF)
    strategy.build(problem_of()(0))
    strategy.run(2)
    assert converted() == {"steps_of"}


def test_of_turns_the_loop_is_converted(converted, tmp_path, monkeypatch):
    (tmp_path / "number.txt").write_text("0")
    monkeypatch.chdir(tmp_path)
    applied = tf.Variable(0, dtype=tf.int64)
    strategy = object.__new__(AsyncParameterServer)
    strategy._turns = Turns(1, applied)
    strategy._turns.deal(3)

    @tf.autograph.experimental.do_not_convert
    def update(iterator):
        applied.assign_add(1)
        return tf.cast(next(iterator), tf.float32)

    loop = strategy._loop(update, 2)
    loop(iter(NUMBERS), tf.constant(0, tf.int64))
    assert int(applied) == 6
    assert strategy._turns.look().taken == 3
    assert converted() == {"loop"}
