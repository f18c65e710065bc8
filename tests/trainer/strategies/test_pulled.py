"""Gradients over pulled values are those over variables, compiled or not."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.plain import dense, examples
from trainer.config import OptimizerConfig, TrainingConfig
from trainer.optimizers import build_optimizer
from trainer.strategies.interface import exact_counter, gradient_of, step_of
from trainer.strategies.pulled import local_steps_of, pull, pulled_gradient_of, push_state

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RATE = 0.1


def close(found, expected, tolerance=1e-6):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)


def built(model=dense, optimizer="sgd"):
    settings = OptimizerConfig(name=optimizer, learning_rate=RATE)
    network, updates = model(), build_optimizer(TrainingConfig(optimizer=settings))
    updates.build(network.trainable_variables)
    return network, updates


def batches(count=1):
    points, labels = examples()
    size = len(labels) // count
    return tf.data.Dataset.from_tensor_slices((points, labels)).batch(size).repeat()


def test_what_is_pulled_does_not_move_with_the_variables():
    model, _ = built()
    before = [variable.numpy() for variable in model.trainable_variables]
    values = pull(model)
    for variable in model.variables:
        variable.assign(tf.cast(tf.fill(variable.shape, 7), variable.dtype))
    close(values.weights, before)
    assert len(values.state) == len(model.non_trainable_variables)


@pytest.mark.parametrize("jit", [False, True])
def test_a_pulled_gradient_is_the_gradient(jit):
    plain, pulled = dense(), dense()
    loss, expected = gradient_of(plain, CROSS_ENTROPY)(examples())
    value, found = pulled_gradient_of(pulled, CROSS_ENTROPY, jit=jit)(examples())
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, expected, 1e-5)
    # The statistics of the batch have moved as well.
    close(pulled.get_weights(), plain.get_weights(), 1e-5)


def test_a_compiled_gradient_is_the_plain_one():
    (value, found), (other, compiled) = (
        gradient_of(dense(), CROSS_ENTROPY, jit=jit)(examples()) for jit in (False, True)
    )
    assert float(other) == pytest.approx(float(value), rel=1e-5)
    close(compiled, found, 1e-5)


def test_what_a_batch_does_not_reach_has_a_gradient_of_zero():
    def apart():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2,))
        idle = keras.layers.Dense(3, name="idle")
        idle.build((None, 2))
        model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(inputs))
        model.idle = idle
        return model

    model = apart()
    _, found = pulled_gradient_of(model, CROSS_ENTROPY, jit=False)(examples())
    idle = [i for i, v in enumerate(model.trainable_variables) if "idle" in v.path]
    assert idle
    assert all(float(tf.reduce_max(tf.abs(found[index]))) == 0 for index in idle)


def test_a_gradient_of_looked_up_rows_is_dense():
    keras.utils.set_random_seed(0)
    table = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Flatten()]
    )
    batch = tf.constant([[1, 1], [2, 5]]), tf.constant([0, 3])
    loss, expected = gradient_of(table, CROSS_ENTROPY)(batch)
    value, found = pulled_gradient_of(table, CROSS_ENTROPY, jit=False)(batch)
    assert isinstance(found[0], tf.Tensor)
    assert float(value) == pytest.approx(float(loss))
    close(found, [tf.convert_to_tensor(expected[0])])


def test_the_state_that_others_have_moved_is_kept():
    model, _ = built()
    mean = next(v for v in model.non_trainable_variables if v.path.endswith("moving_mean"))
    values = pull(model)
    mean.assign_add(tf.ones_like(mean.value))
    push_state(model, values.state, [each + tf.cast(2, each.dtype) for each in values.state])
    close([mean.value], [tf.fill(mean.shape, 3.0)])


def run_local(model, optimizer, steps, *, jit=False, count=1):
    update = local_steps_of(model, optimizer, CROSS_ENTROPY, steps=steps, jit=jit)
    iterator = iter(batches(count))
    return float(tf.function(lambda: update(iterator))())


@pytest.mark.parametrize("jit", [False, True])
def test_one_local_step_is_a_plain_step(jit):
    plain, optimizer = built()
    loss = step_of(plain, optimizer, CROSS_ENTROPY)(examples())
    local, updates = built()
    assert run_local(local, updates, 1, jit=jit) == pytest.approx(float(loss), rel=1e-5)
    close(local.get_weights(), plain.get_weights(), 1e-5)


@pytest.mark.parametrize("steps", [2, 5])
def test_local_steps_under_gradient_descent_are_as_many_plain_ones(steps):
    plain, optimizer = built()
    step, iterator = step_of(plain, optimizer, CROSS_ENTROPY), iter(batches(3))
    losses = [float(step(next(iterator))) for _ in range(steps)]
    local, updates = built()
    mean = run_local(local, updates, steps, count=3)
    assert mean == pytest.approx(sum(losses) / steps, rel=1e-4)
    close(local.get_weights(), plain.get_weights(), 1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_local_steps_are_one_update_of_the_server(optimizer):
    model, updates = built(optimizer=optimizer)
    counter = exact_counter(updates)
    run_local(model, updates, 4)
    assert int(counter) == 1


def test_other_units_are_dropped_in_every_local_step():
    model, updates = built(partial(dense, dropout=0.5))
    seed = next(v for v in model.non_trainable_variables if "seed_generator" in v.path)
    before = np.array(seed.value)
    run_local(model, updates, 3)
    assert int(seed.value[1]) - int(before[1]) == 3
