"""Tests that shards share one trace of a branch, with their resources as arguments."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.embeddings.table_shard import SharedBranch
from tests.trainer.embeddings.test_embedding_table import in_graph, known, table

CPU = "/device:CPU:0"


class Counter:
    """A number that a branch increments, and a count of the branch's traces."""

    traced = 0

    def __init__(self, start):
        self.number = tf.Variable(start, dtype=tf.int64)

    def add(self, given, factor):
        Counter.traced += 1
        with tf.control_dependencies([self.number.assign_add(factor * tf.reduce_sum(given))]):
            return tf.fill(tf.shape(given), self.number.read_value())

    def run(self, branch, is_needed, given, factor, **placed):
        given, handles = (given, tf.constant(factor, tf.int64)), [self.number.handle]
        return branch.run(is_needed, self.add, given, handles, **{"device": CPU, **placed})


@pytest.fixture(autouse=True)
def untraced():
    Counter.traced = 0


@pytest.mark.parametrize("device", [CPU, "/device:GPU:0"])
def test_each_owner_changes_its_own_resources_by_one_trace(device):
    branch, counters = SharedBranch(), [Counter(start) for start in (100, 200, 300)]

    @tf.function(autograph=False)
    def step(is_needed, given):
        return [
            each.run(branch, is_needed, given, factor, device=device)
            for factor, each in enumerate(counters, start=1)
        ]

    given, expected = tf.constant([1, 2], tf.int64), [103, 206, 309]
    assert [each.numpy().tolist() for each in step(tf.constant(False), given)] == [[1, 2]] * 3
    found = [each.numpy().tolist() for each in step(tf.constant(True), given)]
    assert found == [[each, each] for each in expected]
    assert [each.number.numpy() for each in counters] == expected
    assert Counter.traced == 1


@pytest.mark.parametrize("device", [CPU, "/device:GPU:0"])
def test_without_a_graph_it_is_run_by_python(device):
    branch, counter = SharedBranch(), Counter(5)
    given = tf.constant([1, 2], tf.int64)
    for is_needed, found in ((False, [1, 2]), (True, [11, 11]), (True, [17, 17])):
        got = counter.run(branch, tf.constant(is_needed), given, 2, device=device)
        assert got.numpy().tolist() == found
    assert Counter.traced == 2


def test_another_number_of_resources_or_another_kind_is_another_branch():
    branch, counter, other = SharedBranch(), Counter(1), Counter(2)
    given = (tf.constant([2], tf.int64), tf.constant(1, tf.int64))

    def both(given, factor):
        with tf.control_dependencies([other.number.assign(7)]):
            return counter.add(given, factor)

    @tf.function(autograph=False)
    def step(*kinds):
        for kind in kinds:
            counter.run(branch, tf.constant(True), given[0], 1, kind=kind)
        handles = [counter.number.handle, other.number.handle]
        return branch.run(tf.constant(True), both, given, handles, CPU, kinds[0])

    step("a", "a")
    assert (other.number.numpy(), Counter.traced) == (7, 2)
    step("a", "b")
    assert (counter.number.numpy(), Counter.traced) == (1 + 6 * 2, 3)


def grown(*tables):
    """Return the number of traced functions that insert ids, if all tables look up the same ids."""

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        return [layer(ids, training=True) for layer in tables]

    step(np.arange(30))
    functions = step.get_concrete_function().graph.as_graph_def().library.function
    return sum(any(n.op == "LookupTableInsertV2" for n in each.node_def) for each in functions)


def connected(*tables, slots=(0.5, 0.5)):
    """Connect tables as a strategy does, each with its own optimizer slot."""
    steps = tf.Variable(0, dtype=tf.int64)
    for layer, slot in zip(tables, slots, strict=False):
        layer.connect(
            steps, lambda rows, slot=slot: [(tf.Variable(tf.zeros(rows.shape)), slot)], tables[0]
        )
    return tables


def seeded(seed, capacity=64, **named):
    drawn = keras.initializers.RandomUniform(seed=seed)
    return table(capacity, **{"initializer": drawn, "shards": 2, **named})


def test_tables_that_differ_by_their_seeds_share_one():
    one, other, alone = seeded(1), seeded(2), seeded(2)
    assert grown(*connected(one, other)) == 1
    assert grown(*connected(alone)) == 1
    rows = [layer(tf.range(30, dtype=tf.int64), training=False).numpy() for layer in (one, other)]
    assert not (rows[0] == rows[1]).any()
    np.testing.assert_array_equal(rows[1], alone(tf.range(30, dtype=tf.int64)).numpy())
    for layer in (one, other):
        assert layer.metrics()["rows"] == 30
        for shard in layer.parts:
            there = shard.noted.used.numpy()[: shard.capacity] >= 0
            slot, _ = shard.slots[0]
            assert (slot.numpy()[: shard.capacity][there] == 0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "slots"),
    [
        ({"capacity": 62}, (0.5, 0.5)),
        ({"min_count": 2}, (0.5, 0.5)),
        ({"min_age": 5}, (0.5, 0.5)),
        ({"max_age": 9}, (0.5, 0.5)),
        ({"initializer": "zeros"}, (0.5, 0.5)),
        ({}, (0.5, 0.25)),
    ],
)
def test_tables_that_differ_otherwise_share_none(named, slots):
    assert grown(*connected(seeded(1), seeded(1, **named), slots=slots)) == 2


class Unnamed(keras.initializers.Initializer):
    """An initializer whose configuration lacks its value."""

    def __init__(self, value):
        self.value = value

    def __call__(self, shape, dtype=None):
        return tf.fill(shape, tf.cast(self.value, dtype))


class Wide(Unnamed):
    """An initializer whose configuration cannot be written as JSON."""

    def get_config(self):
        return {"value": np.float32(self.value)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "drawn", [Unnamed, Wide, lambda value: lambda *_, **__: tf.fill((30, 3), value)]
)
def test_those_of_initializers_of_the_user_share_none(drawn):
    tables = connected(*(table(64, initializer=drawn(value)) for value in (1.0, 5.0)))
    assert grown(*tables) == 2
    for layer, value in zip(tables, (1.0, 5.0), strict=True):
        rows = layer(tf.range(30, dtype=tf.int64), training=False).numpy()
        assert (rows == value).all()


def test_the_graph_of_a_step_has_no_operation_of_it():
    layer = table(64, shards=3)
    step = in_graph(layer)
    assert grown(layer) == 1
    kinds = [each.type for each in step.get_concrete_function().graph.get_operations()]
    assert kinds.count("If") == 3
    assert "LookupTableInsertV2" not in kinds
    assert all(known(layer, np.arange(30)))
    assert all((shard.noted.used.numpy() >= 0).any() for shard in layer.parts)
