"""Gradients over pulled values are those over variables, compiled or not."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import dense, examples
from tests.trainer.strategies.traced import ancestors
from trainer.config.optimizer import OptimizerConfig
from trainer.config.schema import TrainingConfig
from trainer.strategies.async_parameter_server import local_steps_of
from trainer.strategies.gradients import apply_and_count, pull, pulled_gradient_of, push_state
from trainer.strategies.placement import build_slots
from trainer.strategies.strategy import exact_counter, gradient_of, step_of
from trainer.training.optimizers import build_optimizer

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


def packed(function):
    """Return how many tensors each message packs."""
    graph = tf.function(function).get_concrete_function().graph
    return sorted(
        len(each.inputs) - 1
        for each in graph.get_operations()
        if each.type == "ConcatV2" and each.inputs[-1].shape.rank == 0
    )


def test_a_loss_for_the_server_of_the_variables_is_part_of_the_message_of_their_gradient():
    model, _ = built()
    where = model.trainable_variables[0].value.device
    stays = pulled_gradient_of(model, cross_entropy, jit=False)
    sent = pulled_gradient_of(model, cross_entropy, jit=False, loss_on=where)
    weights = len(model.trainable_variables)
    assert weights in packed(lambda: stays(examples()))
    of_sent = packed(lambda: sent(examples()))
    assert weights + 1 in of_sent
    assert weights not in of_sent
    (loss, found), (expected, same) = sent(examples()), stays(examples())
    close([loss, *found], [expected, *same, expected])


def test_an_update_is_counted_after_its_gradient_has_come():
    model, optimizer = built(optimizer="adam")
    counter = exact_counter(optimizer)
    gradient = pulled_gradient_of(model, cross_entropy, jit=False)

    @tf.function
    def turn():
        for number in range(3):
            loss, found = gradient(examples())
            found = [tf.identity(each, name=f"gradient-{number}-part") for each in found]
            apply_and_count(optimizer, found, model.trainable_variables)
        return loss

    graph = turn.get_concrete_function().graph
    counted = [
        {each.name[:10] for each in ancestors(operation) if each.name.startswith("gradient-")}
        for operation in graph.get_operations()
        if operation.type == "AssignAddVariableOp" and operation.name.startswith("AssignAdd")
    ]
    assert [len(each) for each in counted] == [1, 2, 3]
    turn()
    assert counter.numpy() == 3


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
    loss, expected = gradient_of(plain, cross_entropy)(examples())
    value, found = pulled_gradient_of(pulled, cross_entropy, jit=jit)(examples())
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, expected, 1e-5)
    # The statistics of the batch have moved as well.
    close(pulled.get_weights(), plain.get_weights(), 1e-5)


def test_a_compiled_gradient_is_the_plain_one():
    (value, found), (other, compiled) = (
        gradient_of(dense(), cross_entropy, jit=jit)(examples()) for jit in (False, True)
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
    _, found = pulled_gradient_of(model, cross_entropy, jit=False)(examples())
    idle = [i for i, v in enumerate(model.trainable_variables) if "idle" in v.path]
    assert idle
    assert all(float(tf.reduce_max(tf.abs(found[index]))) == 0 for index in idle)


def test_a_gradient_of_looked_up_rows_is_dense():
    keras.utils.set_random_seed(0)
    table = keras.Sequential(
        [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Flatten()]
    )
    batch = tf.constant([[1, 1], [2, 5]]), tf.constant([0, 3])
    loss, expected = gradient_of(table, cross_entropy)(batch)
    value, found = pulled_gradient_of(table, cross_entropy, jit=False)(batch)
    assert isinstance(found[0], tf.Tensor)
    assert float(value) == pytest.approx(float(loss))
    close(found, [tf.convert_to_tensor(expected[0])])


def state_of(model, ending):
    return next(v for v in model.non_trainable_variables if v.path.endswith(ending))


def test_what_others_have_counted_is_kept():
    model, _ = built(dropping)
    seed = state_of(model, "seed_generator_state")
    before, values = seed.numpy(), pull(model)
    seed.assign_add(tf.ones_like(seed.value))
    push_state(
        model.non_trainable_variables,
        values.state,
        [each + tf.cast(2, each.dtype) for each in values.state],
    )
    np.testing.assert_array_equal(seed.numpy(), before + 3)


def test_parts_of_several_workers_do_not_take_an_average_beyond_what_they_saw():
    model, _ = built()
    variance = state_of(model, "moving_variance")
    every = [pull(model) for _ in range(16)]
    for values in every:
        push_state(
            model.non_trainable_variables,
            values.state,
            [each * tf.cast(0.8, each.dtype) for each in values.state],
        )
    close([variance.value], [tf.fill(variance.shape, 0.8)])


def dropping():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((2,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    return keras.Sequential(layers)


class Own(keras.Model):
    """A model as people write it: `training` is not handed on, since Keras does that."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.out = keras.layers.Dense(3)

    def call(self, inputs):
        return self.out(self.norm(inputs))


@pytest.mark.parametrize("jit", [False, True])
def test_a_model_that_is_a_class_of_its_own_trains_as_in_place(jit):
    def own():
        keras.utils.set_random_seed(0)
        model = Own()
        model(examples()[0])
        return model

    plain, pulled = own(), own()
    before = [each.numpy() for each in plain.non_trainable_variables]
    loss, expected = gradient_of(plain, cross_entropy)(examples())
    value, found = pulled_gradient_of(pulled, cross_entropy, jit=jit)(examples())
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, expected, 1e-5)
    close(pulled.get_weights(), plain.get_weights(), 1e-5)
    # It is the statistics of the batch that were taken, and kept.
    after = pulled.non_trainable_variables
    assert any(not np.allclose(a, b) for a, b in zip(after, before, strict=True))


def test_losses_of_layers_may_have_any_shape_and_precision():
    class Loud(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.cast(tf.reduce_mean(inputs, 0), tf.bfloat16))
            return inputs

    def loud():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((2,)), Loud(), keras.layers.Dense(3)])

    loss, expected = gradient_of(loud(), cross_entropy)(examples())
    value, found = pulled_gradient_of(loud(), cross_entropy, jit=False)(examples())
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, expected, 1e-5)


def run_local(model, optimizer, steps, *, jit=False, count=1):
    update = local_steps_of(model, optimizer, cross_entropy, steps=steps, jit=jit)
    iterator = iter(batches(count))
    return float(tf.function(lambda: update(iterator))())


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_one_local_step_is_a_plain_step(jit):
    plain, optimizer = built()
    loss = step_of(plain, optimizer, cross_entropy)(examples())
    local, updates = built()
    assert run_local(local, updates, 1, jit=jit) == pytest.approx(float(loss), rel=1e-5)
    close(local.get_weights(), plain.get_weights(), 1e-5)


@pytest.mark.parametrize("steps", [2, 5])
def test_local_steps_under_gradient_descent_are_as_many_plain_ones(steps):
    plain, optimizer = built()
    step, iterator = step_of(plain, optimizer, cross_entropy), iter(batches(3))
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


def test_state_that_no_layer_moves_is_not_pushed_after_local_steps():
    frozen = keras.layers.Dense(3, trainable=False)
    norm = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), frozen, norm, keras.layers.Dense(3)])
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(model.trainable_variables)
    update = local_steps_of(model, optimizer, cross_entropy, steps=4, jit=False)
    iterator = iter(batches())
    graph = tf.function(lambda: update(iterator)).get_concrete_function().graph
    places = {id(outer): inner for outer, inner in graph.captures}
    assigned = {
        id(each.inputs[0]) for each in graph.get_operations() if each.type == "AssignVariableOp"
    }

    def is_assigned(variable):
        return id(places[id(variable.value.handle)]) in assigned

    assert is_assigned(norm.moving_mean)
    assert is_assigned(norm.moving_variance)
    assert not is_assigned(frozen.kernel)
    assert not is_assigned(frozen.bias)


def test_the_loop_of_local_steps_stays_on_the_worker():
    worker = "/job:worker/task:1"
    model, optimizer = dense(), keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(1, 9))
    build_slots(optimizer, model)
    update = local_steps_of(model, optimizer, cross_entropy, steps=4, jit=False)
    iterator = iter(batches())

    @tf.function
    def closure():
        with tf.device(worker):
            return update(iterator)

    found = closure.get_concrete_function().graph.get_operations()
    (loop,) = (each for each in found if each.type in {"While", "StatelessWhile"})
    # A captured tensor is on the device on which it is used.
    given = [each.op for each in loop.inputs if each.op.type != "Placeholder"]
    assert len(given) > len(model.trainable_variables)
    assert {each.device for each in given} == {worker}
