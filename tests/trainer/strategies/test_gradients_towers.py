"""Tests that the gradient of two towers equals that of both batches on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.optimizers.loss_scale import FIRST, LossScale
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.strategies.async_parameter_server import build_local_steps
from flotilla.trainer.strategies.gradients import ONE, Towers, build_pulled_gradient, list_towers
from flotilla.trainer.strategies.strategy import build_gradient
from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import examples

# TensorFlow replaces a missing device with the only device of this process.
TWO = Towers(devices=("/device:CPU:0", "/device:CPU:1"))
RATE = 0.1


def plain():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


def table():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(9, 4)]
    return keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(3)])


def rows():
    random = np.random.default_rng(0)
    return tf.constant(random.integers(0, 9, (8, 2))), tf.constant(random.integers(0, 3, 8))


def halves(batch):
    size = len(batch[1]) // 2
    return [tuple(each[part : part + size] for each in batch) for part in (0, size)]


def close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(tf.convert_to_tensor(mine), theirs, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_two_towers_are_one_with_both_batches(jit):
    loss, expected = build_pulled_gradient(plain(), cross_entropy, jit=False)(examples())
    towers = tf.function(build_pulled_gradient(plain(), cross_entropy, jit=jit, towers=TWO))
    value, found = towers(halves(examples()))
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, expected)


def test_each_tower_computes_on_its_device_and_variables_are_read_once():
    model = plain()
    towers = tf.function(build_pulled_gradient(model, cross_entropy, jit=False, towers=TWO))
    graph = towers.get_concrete_function(halves(examples())).graph
    calls = [each for each in graph.get_operations() if "PartitionedCall" in each.type]
    assert [each.device[-5:] for each in calls] == ["CPU:0", "CPU:1"]
    reads = [each for each in graph.get_operations() if each.type == "ReadVariableOp"]
    assert len(reads) == len(model.trainable_variables)


def test_looked_up_rows_of_all_towers_stay_sparse():
    loss, expected = build_gradient(table(), cross_entropy)(rows())
    towers = tf.function(TWO.gradient(build_gradient(table(), cross_entropy)))
    value, found = towers(halves(rows()))
    assert isinstance(found[0], tf.IndexedSlices)
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    close(found, map(tf.convert_to_tensor, expected))


@pytest.mark.slow
def test_local_steps_take_a_batch_for_each_device():
    def updated(towers, size):
        model, optimizer = plain(), keras.optimizers.SGD(RATE)
        optimizer.build(model.trainable_variables)
        update = build_local_steps(
            model, optimizer, cross_entropy, steps=3, jit=False, towers=towers
        )
        data = iter(tf.data.Dataset.from_tensor_slices(examples()).batch(size).repeat())
        return float(tf.function(lambda: update(data))()), model.get_weights()

    count = len(examples()[1])
    (loss, weights), (value, found) = updated(ONE, count), updated(TWO, count // 2)
    assert value == pytest.approx(loss, rel=1e-5)
    close(found, weights)


@pytest.mark.slow
def test_moving_averages_are_averaged_and_the_first_towers_draws_count():
    def normed():
        keras.utils.set_random_seed(0)
        norm = keras.layers.BatchNormalization(momentum=0.5)
        layers = [keras.Input((2,)), norm, keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        return keras.Sequential(layers)

    def moved(batch, **towers):
        model = normed()
        before = [np.array(each) for each in model.non_trainable_variables]
        tf.function(build_pulled_gradient(model, cross_entropy, jit=False, **towers))(batch)
        return before, [np.array(each) for each in model.non_trainable_variables]

    first, second = halves(examples())
    before, together = moved([first, second], towers=TWO)
    (_, mine), (_, theirs) = moved(first), moved(second)
    paths = [each.path for each in normed().non_trainable_variables]
    for path, *values in zip(paths, before, together, mine, theirs, strict=True):
        old, both, one, other = values
        if path.endswith("seed_generator_state"):
            assert (both - old).tolist() == [0, 1]
        else:
            np.testing.assert_allclose(both, (one + other) / 2, atol=1e-6)


def test_no_two_towers_drop_the_same_units():
    class Dropped(keras.Model):
        def __init__(self):
            super().__init__()
            self.drop = keras.layers.Dropout(0.5)
            self.kernel = self.add_weight(shape=(64,), initializer="ones", name="kernel")

        def call(self, inputs):
            return self.drop(inputs * self.kernel)

    model = Dropped()
    batch = tf.ones([1, 64]), tf.zeros([1])
    model(batch[0])
    kept = []

    def total(_model, _batch, outputs):
        return tf.reduce_sum(outputs)

    for devices in (ONE, TWO):
        taken = batch if devices is ONE else [batch, batch]
        gradient = build_pulled_gradient(model, total, jit=False, towers=devices)
        _, (found,) = tf.function(gradient)(taken)
        kept.append(set(np.unique(found.numpy()).tolist()))
    # If only one of two towers kept the unit, the mean is half of its value.
    assert kept == [{0.0, 2.0}, {0.0, 1.0, 2.0}]


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_towers_accumulate_and_scale_on_their_own(whole):
    parts, factor = 2, 1e35
    model, batch = (plain, examples()) if whole else (table, rows())
    model, single = model(), model()
    _, expected = build_gradient(single, cross_entropy)(batch)
    expected = list(map(tf.convert_to_tensor, expected))
    scale = LossScale()

    def loss(*args):
        # The gradient of this loss overflows at the initial scale.
        return cross_entropy(*args) * factor

    gradient = build_pulled_gradient(
        model, loss, jit=False, parts=parts, scale=scale, in_place=not whole, towers=TWO
    )
    stacks = [
        tuple(tf.reshape(each, [parts, -1, *each.shape[1:]]) for each in half)
        for half in halves(batch)
    ]
    _, found = tf.function(gradient)(stacks)
    assert isinstance(found[0], tf.IndexedSlices) is not whole
    close([tf.convert_to_tensor(each) / factor for each in found], expected)
    value, count, changed = (each.value.numpy() for each in scale.variables)
    assert value < FIRST
    assert np.log2(value) == int(np.log2(value))
    # The count is the same as for one worker that computes the batches one after another.
    assert 1 <= changed <= count == parts


def test_a_scale_that_is_too_large_for_one_tower_is_halved():
    scale = LossScale()

    def compute(_weights, state, overflows):
        value, count, changed = state
        return tf.constant(1.0), [], [value / (2 if overflows else 1), count + 1, changed]

    state = [each.value.read_value() for each in scale.variables]
    _, _, after = TWO.pure(compute, scale.variables)([], state, [False, True])
    assert float(after[0]) == FIRST / 2
    assert int(after[1]) == 1


def test_one_device_leaves_everything_as_it_was():
    def gradient(batch):
        return batch

    assert ONE.gradient(gradient) is gradient
    assert ONE.pure(gradient, []) is gradient
    assert ONE.take(iter([1, 2])) == 1
    assert TWO.take(iter([1, 2])) == [1, 2]


def names(**counts):
    return [
        f"/job:worker/replica:0/task:{worker[1:]}/device:{kind}:{index}"
        for worker, kinds in counts.items()
        for kind, count in kinds.items()
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("counts", "devices"),
    [
        ({"w0": {"CPU": 1}, "w1": {"CPU": 1}}, ["/device:CPU:0"]),
        ({"w0": {"CPU": 1, "GPU": 1}}, ["/device:GPU:0"]),
        ({f"w{n}": {"CPU": 1, "GPU": 2} for n in (0, 1)}, ["/device:GPU:0", "/device:GPU:1"]),
        ({"w0": {"CPU": 2}}, ["/device:CPU:0", "/device:CPU:1"]),
    ],
)
def test_a_worker_computes_on_all_of_its_gpus_or_on_its_processor(counts, devices):
    others = [f"/job:{job}/replica:0/task:0/device:GPU:7" for job in ("chief", "ps")]
    assert list(list_towers([*others, *names(**counts)]).devices) == devices


def test_workers_with_different_numbers_of_gpus_are_one_line():
    with pytest.raises(UserError) as caught:
        list_towers(names(w0={"CPU": 1, "GPU": 2}, w1={"CPU": 1}))
    assert str(caught.value) == (
        "every worker needs the same number of GPUs, but worker-0 has 2, worker-1 has 0: set "
        "CUDA_VISIBLE_DEVICES if you start tasks yourself"
    )
