"""A branch of a table's graph: traced once, of the resources that it is given."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.models.test_embedding_table import known, table
from trainer.models.shared_branch import SharedBranch


class Counter:
    """A number that its branch adds to, and how often that was traced."""

    traced = 0

    def __init__(self, start):
        self.number = tf.Variable(start, dtype=tf.int64)

    def add(self, given, factor):
        Counter.traced += 1
        with tf.control_dependencies([self.number.assign_add(factor * tf.reduce_sum(given))]):
            return tf.fill(tf.shape(given), self.number.read_value())

    def run(self, branch, is_needed, given, factor, device="/device:CPU:0"):
        given = (given, tf.constant(factor, tf.int64))
        return branch.run(is_needed, self.add, given, [self.number.handle], device)


@pytest.fixture(autouse=True)
def untraced():
    Counter.traced = 0


@pytest.mark.parametrize("device", ["/device:CPU:0", "/device:GPU:0"])
def test_each_owner_changes_its_own_resources_by_one_trace(device):
    branch, counters = SharedBranch(), [Counter(start) for start in (100, 200, 300)]

    @tf.function(autograph=False)
    def step(is_needed, given):
        return [
            each.run(branch, is_needed, given, factor, device)
            for factor, each in enumerate(counters, start=1)
        ]

    given = tf.constant([1, 2], tf.int64)
    assert [each.numpy().tolist() for each in step(tf.constant(False), given)] == [[1, 2]] * 3
    assert [each.numpy().tolist() for each in step(tf.constant(True), given)] == [
        [103, 103],
        [206, 206],
        [309, 309],
    ]
    assert [each.number.numpy() for each in counters] == [103, 206, 309]
    assert Counter.traced == 1


@pytest.mark.parametrize("device", ["/device:CPU:0", "/device:GPU:0"])
def test_without_a_graph_it_is_run_by_python(device):
    branch, counter = SharedBranch(), Counter(5)
    given = tf.constant([1, 2], tf.int64)
    for is_needed, found in ((False, [1, 2]), (True, [11, 11]), (True, [17, 17])):
        got = counter.run(branch, tf.constant(is_needed), given, 2, device)
        assert got.numpy().tolist() == found
    assert Counter.traced == 2


def test_other_types_or_another_number_of_resources_are_another_branch():
    branch, counter, other = SharedBranch(), Counter(1), Counter(2)

    def both(given):
        with tf.control_dependencies([other.number.assign(7)]):
            return counter.add(given, tf.constant(1, tf.int64))

    @tf.function(autograph=False)
    def step(given):
        one = counter.run(branch, tf.constant(True), given, 1)
        with tf.control_dependencies([one]):
            handles = [counter.number.handle, other.number.handle]
            return branch.run(tf.constant(True), both, [given], handles, "/device:CPU:0")

    assert step(tf.constant([2], tf.int64)).numpy().tolist() == [5]
    assert other.number.numpy() == 7
    assert Counter.traced == 2


def test_the_graph_of_a_step_has_no_operation_of_it():
    layer = table(64, shards=3)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        return layer(ids, training=True)

    kinds = [each.type for each in step.get_concrete_function().graph.get_operations()]
    assert kinds.count("If") == 3
    assert "LookupTableInsertV2" not in kinds
    functions = step.get_concrete_function().graph.as_graph_def().library.function
    inserts = [
        each.signature.name
        for each in functions
        if any(node.op == "LookupTableInsertV2" for node in each.node_def)
    ]
    assert len(inserts) == 1
    step(np.arange(30))
    assert all(known(layer, np.arange(30)))
    assert all((shard.noted.used.numpy() >= 0).any() for shard in layer.parts())
