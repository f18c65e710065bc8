"""Tests weight averages: their values, the swap with the weights, and their initial values."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.optimizers.optimizers import (
    begin_averages,
    build_optimizer,
    find_averages,
    keep_averages,
    swap_averages,
)
from flotilla.trainer.strategies.strategy import create, exact_counter
from tests.trainer.plain import CHIEF, NOBODY, problem_of

MOMENTUM = 0.7
KERNEL, AVERAGE = "model/dense/logits/kernel", "average/dense/logits/kernel"


def single(optimizer="adam", **training):
    config = parse_config({"training": {"strategy": "single", "ema": MOMENTUM, **training}})
    strategy = create(config, NOBODY, CHIEF)
    strategy.build(problem_of(optimizer=optimizer)(0))
    return strategy


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "lamb"])
def test_it_is_the_average_by_hand(optimizer):
    strategy = single(optimizer)
    variables = strategy.variables()
    begin_averages(variables, ())
    expected = None
    for _ in range(6):
        strategy.run(1)
        weights = variables[KERNEL].numpy()
        before = weights if expected is None else expected
        expected = MOMENTUM * before + (1 - MOMENTUM) * weights
        np.testing.assert_allclose(variables[AVERAGE].numpy(), expected, atol=1e-6)
    assert not np.allclose(expected, weights, atol=1e-4)


def test_only_trained_variables_have_one_and_none_is_among_the_slots():
    paths = set(single().variables())
    trained = {"hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta"}
    trained |= {"logits/kernel", "logits/bias"}
    assert {path for path in paths if path.startswith("average/")} == {
        f"average/dense/{name}" for name in trained
    }
    assert not [path for path in paths if path.startswith("optimizer/") and "average" in path]


def test_no_momentum_keeps_none():
    assert not [path for path in single(ema=0).variables() if path.startswith("average/")]


def test_they_are_exchanged_for_a_validation_and_back_also_after_an_error():
    strategy = single()
    variables = strategy.variables()
    begin_averages(variables, ())
    strategy.run(4)
    before = {path: each.numpy() for path, each in variables.items()}

    def fail():
        with swap_averages(variables):
            np.testing.assert_array_equal(variables[KERNEL].numpy(), before[AVERAGE])
            np.testing.assert_array_equal(variables[AVERAGE].numpy(), before[KERNEL])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    for path, each in variables.items():
        np.testing.assert_array_equal(each.numpy(), before[path], err_msg=path)


def test_what_was_not_restored_begins_as_the_weights():
    variables = single().variables()
    begin_averages(variables, {"average/dense/logits/bias"})
    np.testing.assert_array_equal(variables[AVERAGE].numpy(), variables[KERNEL].numpy())


def test_no_update_is_left_out_when_workers_race():
    config = parse_config({"training": {"optimizer": {"name": "sgd", "learning_rate": 1e-9}}})
    optimizer = build_optimizer(config.training)
    keep_averages(optimizer, MOMENTUM)
    variable = tf.keras.Variable(np.ones([50], np.float32))
    optimizer.build([variable])
    exact_counter(optimizer)
    (average,) = find_averages(optimizer).values()
    optimizer.iterations.assign(1)
    average.assign(tf.zeros([50]))

    @tf.function
    def closure():
        for _ in tf.range(5):
            optimizer.apply([tf.zeros([50])], [variable])

    closure.get_concrete_function()
    threads = [threading.Thread(target=closure) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    # Sequential updates give the upper limit. The lower limit is reached if each thread reads the
    # average before, and writes it after, all writes of the other thread.
    left = 1 - average.numpy().max()
    assert -0.0865 <= left <= MOMENTUM**10 + 1e-6
