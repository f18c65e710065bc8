"""Tests that gradients of pulled values equal those of the variables, compiled or not."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.model import OptimizerConfig
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.models.registry import reset_uids
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.async_parameter_server import build_local_steps
from flotilla.trainer.strategies.gradients import (
    Messages,
    PureGradient,
    apply_and_count,
    build_pulled_gradient,
    push_state,
)
from flotilla.trainer.strategies.parameter_server import looks_up
from flotilla.trainer.strategies.placement import build_slots
from flotilla.trainer.strategies.strategy import (
    build_gradient,
    create,
    exact_counter,
    require_updates,
)
from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import CHIEF, NOBODY, Plain, build_step, dense, examples, problem_of
from tests.trainer.strategies.traced import ancestors

RATE = 0.1


def close(found, expected, tolerance=1e-6):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)


def pull(model):
    return PureGradient(model, cross_entropy, jit=False).pull()


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
    """Return the number of tensors in each message."""
    graph = tf.function(function).get_concrete_function().graph
    return sorted(
        len(each.inputs) - 1
        for each in graph.get_operations()
        if each.type == "ConcatV2" and each.inputs[-1].shape.rank == 0
    )


def test_a_loss_for_the_server_of_the_variables_is_part_of_the_message_of_their_gradient():
    model, _ = built()
    where = model.trainable_variables[0].value.device
    stays = build_pulled_gradient(model, cross_entropy, jit=False)
    sent = build_pulled_gradient(model, cross_entropy, jit=False, loss_on=where)
    weights = len(model.trainable_variables)
    assert weights in packed(lambda: stays(examples()))
    of_sent = packed(lambda: sent(examples()))
    assert weights + 1 in of_sent
    assert weights not in of_sent
    (loss, found), (expected, same) = sent(examples()), stays(examples())
    close([loss, *found], [expected, *same, expected])


def test_an_update_is_counted_after_its_gradient_has_come():
    model, optimizer = built(linear)
    counter = exact_counter(optimizer)
    gradient = build_pulled_gradient(model, cross_entropy, jit=False)

    @tf.function
    def turn():
        for number in range(2):
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
    assert [len(each) for each in counted] == [1, 2]
    turn()
    assert counter.numpy() == 2


def test_what_is_pulled_does_not_move_with_the_variables():
    model, _ = built()
    before = [variable.numpy() for variable in model.trainable_variables]
    values = pull(model)
    for variable in model.variables:
        variable.assign(tf.cast(tf.fill(variable.shape, 7), variable.dtype))
    close(values.weights, before)
    assert len(values.state) == len(model.non_trainable_variables)


def test_a_compiled_gradient_is_the_plain_one():
    (value, found), (other, compiled) = (
        build_gradient(linear(), cross_entropy, jit=jit)(examples()) for jit in (False, True)
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
    _, found = build_pulled_gradient(model, cross_entropy, jit=False)(examples())
    idle = [i for i, v in enumerate(model.trainable_variables) if "idle" in v.path]
    assert idle
    assert all(float(tf.reduce_max(tf.abs(found[index]))) == 0 for index in idle)


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


def looked_up():
    reset_uids()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((2,), dtype="int64"), *layers])


class Own(keras.Model):
    """A typical subclassed model, which leaves it to Keras to pass `training` to its layers."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.out = keras.layers.Dense(3)

    def call(self, inputs):
        return self.out(self.norm(inputs))


def own():
    keras.utils.set_random_seed(0)
    model = Own()
    model(examples()[0])
    return model


class Loud(keras.layers.Layer):
    """A layer that adds losses, which may have any shape and precision."""

    def call(self, inputs):
        self.add_loss(tf.cast(tf.reduce_mean(inputs, 0), tf.bfloat16))
        return inputs


def loud():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), Loud(), keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("make", "jit"), [(dense, True), (own, False), (loud, False), (looked_up, False)]
)
def test_a_pulled_gradient_is_the_gradient(make, jit):
    points, labels = examples()
    rows = tf.cast(tf.abs(points) * 2, tf.int64) % 5
    plain, pulled = make(), make()
    batch = (points if make in (dense, own, loud) else rows), labels
    before = [each.numpy() for each in plain.non_trainable_variables]
    loss, expected = build_gradient(plain, cross_entropy)(batch)
    value, found = build_pulled_gradient(pulled, cross_entropy, jit=jit)(batch)
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    # A gradient of looked-up rows is dense, too.
    assert all(isinstance(each, tf.Tensor) for each in found)
    close(found, map(tf.convert_to_tensor, expected), 1e-5)
    close(pulled.get_weights(), plain.get_weights(), 1e-5)
    after = pulled.non_trainable_variables
    assert not before or any(not np.allclose(a, b) for a, b in zip(after, before, strict=True))


def run_local(model, optimizer, steps, *, jit=False, count=1):
    update = build_local_steps(model, optimizer, cross_entropy, steps=steps, jit=jit)
    iterator = iter(batches(count))
    return float(tf.function(lambda: update(iterator))())


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_one_local_step_is_a_plain_step(jit):
    plain, optimizer = built()
    loss = build_step(plain, optimizer, cross_entropy)(examples())
    local, updates = built()
    assert run_local(local, updates, 1, jit=jit) == pytest.approx(float(loss), rel=1e-5)
    close(local.get_weights(), plain.get_weights(), 1e-5)


def test_local_steps_under_gradient_descent_are_as_many_plain_ones_in_one_update():
    steps = 3
    plain, optimizer = built()
    step, iterator = build_step(plain, optimizer, cross_entropy), iter(batches(3))
    losses = [float(step(next(iterator))) for _ in range(steps)]
    local, updates = built()
    counter = exact_counter(updates)
    mean = run_local(local, updates, steps, count=3)
    assert mean == pytest.approx(sum(losses) / steps, rel=1e-4)
    assert int(counter) == 1
    close(local.get_weights(), plain.get_weights(), 1e-5)


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
    update = build_local_steps(model, optimizer, cross_entropy, steps=4, jit=False)
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
    update = build_local_steps(model, optimizer, cross_entropy, steps=4, jit=False)
    iterator = iter(batches())

    @tf.function
    def closure():
        with tf.device(worker):
            return update(iterator)

    found = closure.get_concrete_function().graph.get_operations()
    (loop,) = (each for each in found if each.type in {"While", "StatelessWhile"})
    # Leave out placeholders, which stand for captured tensors.
    given = [each.op for each in loop.inputs if each.op.type != "Placeholder"]
    assert len(given) > len(model.trainable_variables)
    assert {each.device for each in given} == {worker}


PARTS = 4


def linear():
    reset_uids()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((2,)), *layers])


def stacked(batch):
    return tuple(tf.reshape(each, [PARTS, -1, *each.shape[1:]]) for each in batch)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_mean_over_parts_is_the_gradient_of_the_whole(in_place, jit):
    loss, expected = build_gradient(linear(), cross_entropy)(examples())
    of_parts = build_pulled_gradient(
        linear(), cross_entropy, jit=jit, parts=PARTS, in_place=in_place
    )
    value, found = tf.function(of_parts)(stacked(examples()))
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, expected)


def test_rows_stay_rows():
    points, labels = examples()
    batch = tf.cast(tf.abs(points) * 2, tf.int64) % 5, labels
    _, expected = build_gradient(looked_up(), cross_entropy)(batch)
    of_parts = build_pulled_gradient(
        looked_up(), cross_entropy, jit=False, parts=PARTS, in_place=True
    )
    _, found = tf.function(of_parts)(stacked(batch))
    assert isinstance(found[0], tf.IndexedSlices)
    close(*(map(tf.convert_to_tensor, each) for each in (found, expected)))


def test_state_goes_through_all_parts():
    one_by_one, of_parts = dense(), dense()
    batches = stacked(examples())
    step = build_gradient(one_by_one, cross_entropy)
    for part in range(PARTS):
        step(tuple(each[part] for each in batches))
    tf.function(build_pulled_gradient(of_parts, cross_entropy, jit=False, parts=PARTS))(batches)
    for mine, theirs in zip(of_parts.variables, one_by_one.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-6, err_msg=mine.path)


def test_one_process_makes_one_update_of_several_batches():
    plain = Plain()
    config = parse_config({"training": {"strategy": "single", "accumulate": 3}})
    strategy = create(config, NOBODY, CHIEF)
    # All batches are equal.
    for each in (plain, strategy):
        each.build(problem_of(linear)(0))
        each.run(5)
    assert strategy.global_step() == 5
    for path, variable in plain.variables().items():
        found = strategy.variables()[path].numpy()
        np.testing.assert_allclose(found, variable.numpy(), atol=1e-5, err_msg=path)


class OwnStep(keras.Sequential):
    def train_step(self, _data):
        raise NotImplementedError


def normalized():
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(3), name="spectral")
    return keras.Sequential([keras.Input((2,)), dense])


@pytest.mark.parametrize(
    "training", [{"accumulate": 2}, {"ema": 0.5}, {"mixed_precision": "float16"}]
)
def test_a_strategy_or_a_model_that_makes_its_updates_itself_refuses(training):
    key, own = next(iter(training)), f"{Plain.__module__}:{Plain.__name__}"
    config = parse_config({"training": {"strategy": own, **training}})
    with pytest.raises(ConfigError, match=f"training.{key}: '{own}' is not derived"):
        create(config, NOBODY, CHIEF)
    config = parse_config({"training": {"strategy": "single", **training}})
    with pytest.raises(ConfigError) as caught:
        require_updates(config, OwnStep([keras.Input((2,)), keras.layers.Dense(3)]))
    step = "OwnStep.train_step applies its updates itself"
    assert str(caught.value) == f"training.{key}: {step}; leave the key out"
    if key == "ema":
        require_updates(config, normalized())
        return
    with pytest.raises(ConfigError, match=rf"{key}: spectral \(SpectralNormalization\) changes"):
        require_updates(config, normalized())


SHAPES = ((2, 3), (4,), (), (1, 2, 2))


def numbers(shape, begin=0.0):
    return np.arange(begin, begin + np.prod(shape, dtype=int)).reshape(shape)


@pytest.fixture
def variables():
    found = [tf.Variable(numbers(shape), dtype=tf.float32) for shape in SHAPES]
    return [*found, *(tf.Variable(numbers(shape), dtype=tf.int64) for shape in SHAPES)]


def operations(function, kind):
    graph = tf.function(function).get_concrete_function().graph
    return [each for each in graph.get_operations() if each.type == kind]


def test_what_is_pulled_or_pushed_is_what_was_sent(variables):
    sent = [tf.cast(numbers(v.shape, 7.0), v.dtype) for v in variables]
    messages = Messages(variables)
    for found, expected in ((messages.pull(), variables), (messages.push(sent), sent)):
        for value, given in zip(found, expected, strict=True):
            assert (value.dtype, value.shape) == (given.dtype, given.shape)
            np.testing.assert_array_equal(value, given)
    assert Messages([]).pull() == Messages([]).push([]) == []


def test_there_is_one_message_for_each_type(variables):
    messages = Messages(variables)
    assert len(operations(messages.pull, "ConcatV2")) == 2
    assert len(operations(lambda: messages.push(messages.pull()), "ConcatV2")) == 4


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
            messages.push(messages.pull())
    packed = [each for each in graph.get_operations() if each.type == "ConcatV2"]
    assert [each.device for each in packed[:2]] == [devices[0], devices[2]]
    assert {each.device for each in packed[2:]} == {"/job:worker/device:CPU:0"}
    parts = [each.device for each in graph.get_operations() if each.type == "SplitV"]
    assert parts.count("/job:worker/device:CPU:0") == 2
    assert {devices[0], devices[2]} <= set(parts)


def test_a_gradient_of_half_precision_is_pushed_in_the_type_of_its_variable():
    variable = tf.Variable([1.0, 2.0])
    (value,) = Messages([variable]).push([tf.constant([0.5, 0.25], tf.bfloat16)])
    assert value.dtype == tf.float32
    np.testing.assert_array_equal(value, [0.5, 0.25])


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
    """A user's layer that looks up rows of a table."""

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
