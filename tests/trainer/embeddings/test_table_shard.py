"""Tests a shard of a dynamic table with concurrent, late and lost workers."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.embeddings import hashes as sieve
from flotilla.trainer.embeddings import table_shard
from tests.trainer.embeddings.test_embedding_table import (
    DIMENSION,
    KEYS,
    ids_of,
    in_graph,
    known,
    table,
    trained,
)


def counted(capacity, step=0, **named):
    """Return a table with a step counter, and a function that trains at a step."""
    layer, steps = table(capacity, **named), tf.Variable(step, dtype=tf.int64)
    layer.connect(steps, lambda _: [])

    def train_at(step, ids):
        steps.assign(step)
        trained(layer, ids)

    return layer, steps, train_at


class Truth:
    """The expected state of a table with one shard: exact counts of ids, and the ids with a row."""

    def __init__(self, layer):
        (self._shard,) = layer.parts
        self._step, self._min_count = in_graph(layer), layer.min_count
        self._counted = 0
        self.counts, self.due, self.with_row = Counter(), set(), set()

    def train(self, batch):
        self._step(tf.constant(batch))
        self.counts.update(each for each in batch.tolist() if each not in self.with_row)
        self.due.update(each for each in batch.tolist() if self.counts[each] >= self._min_count)
        counted, _ = self._shard.window.numpy().tolist()
        if counted < self._counted:
            self.counts = Counter({each: count // 2 for each, count in self.counts.items()})
        self._counted = counted
        noted, slots = self._shard.noted, self._shard.capacity
        self.with_row = set(noted.ids.numpy()[:slots][noted.used.numpy()[:slots] >= 0].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("min_count", [2, 3, 10])
def test_of_ids_that_come_once_few_get_a_row(min_count):
    layer = table(8000, min_count=min_count)
    step = in_graph(layer)
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, (200, 500))
    for batch in ids:
        step(batch)
    assert layer.metrics()["rows"] < 0.03 * ids.size
    for batch in np.tile(ids[-1], (min_count - 1, 1)):
        step(batch)
    assert all(known(layer, ids[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(("min_count", "seed"), [(2, 0), (3, 1), (10, 2)])
def test_an_id_that_came_often_enough_is_never_turned_away_and_few_others_get_a_row(
    min_count, seed
):
    # With this capacity, rows are always free.
    layer = table(6000, min_count=min_count)
    truth, random, came = Truth(layer), np.random.default_rng(seed), set()
    for _ in range(150):
        batch = random.zipf(1.2, random.integers(1, 1500)) % 10**6 - 5 * 10**5
        truth.train(batch)
        came.update(batch.tolist())
        assert truth.due <= truth.with_row
    assert layer.metrics() == {**layer.metrics(), "evicted": 0, "rows": len(truth.with_row)}
    assert len(truth.due) > 300
    assert len(truth.with_row - truth.due) < 0.03 * len(came - truth.due)


@pytest.mark.parametrize(("capacity", "ids"), [(1000, 3900), (100, 5000)])
def test_ids_of_a_large_batch_are_not_forgotten_before_the_next_one(capacity, ids):
    layer = table(capacity, min_count=3)
    for rows in (0, 0, capacity):
        trained(layer, range(ids))
        assert layer.metrics()["rows"] == rows


@pytest.mark.slow
@pytest.mark.parametrize("small", [1, 64, 900])
def test_ids_of_a_large_batch_are_not_forgotten_by_small_ones_in_between(small):
    layer, due = table(100, min_count=3), set()
    for number in range(12):
        for ids in (range(small), range(small, small + 4096)):
            trained(layer, ids)
            if number >= 2:
                due.update(each for each, has in zip(ids, known(layer, ids), strict=True) if has)
    # All 100 rows are in use, and over time more than 100 ids have had one.
    assert layer.metrics()["rows"] == 100
    assert len(due) > 100


def sieved(layer):
    (shard,) = layer.parts
    return int(shard.noted.tally.numpy()[table_shard.SIEVED])


def test_the_sieve_is_halved_by_the_ids_that_it_holds_however_often_they_come():
    layer = table(2, min_count=3)
    (shard,) = layer.parts
    limit = sieve.WINDOW * shard.noted.seen.shape[0]
    # The ids occur more than `limit` times in total, but the sketch holds only 64 ids.
    for _ in range(40):
        trained(layer, [*range(64)] * 2)
    assert 60 <= sieved(layer) <= 64
    assert shard.noted.seen.numpy().max() == 80
    first, held = 1000, 0
    while sieved(layer) >= held:
        held = sieved(layer)
        trained(layer, range(first, first + 100))
        first += 100
    assert 0.85 * limit < held <= limit
    assert shard.noted.seen.numpy().max() == 40


def test_the_sieve_knows_what_it_holds_after_it_was_halved():
    layer = table(100, min_count=3)
    (shard,) = layer.parts
    for _ in range(4):
        trained(layer, range(2000))
    seen = shard.noted.seen.numpy()
    assert seen.max() == 2
    assert sieved(layer) == np.count_nonzero(seen) // sieve.CELLS_OF_ID
    counted, largest = shard.window.numpy().tolist()
    assert (counted, largest) == (0, 1000)


def test_a_cell_of_the_sieve_does_not_begin_anew_when_it_is_full():
    layer = table(1, min_count=255, min_age=3)
    trained(layer, [1] * 254)
    assert known(layer, [1]) == [False]
    trained(layer, [1])
    assert known(layer, [1]) == [True]
    # No row is free, and the id occurs more often than a cell can count.
    for each in ([2] * 300, [3], [4]):
        trained(layer, each)
    assert known(layer, [1, 2]) == [True, False]
    trained(layer, [2])
    assert known(layer, [1, 2]) == [False, True]


def test_ages_are_those_of_the_counter_that_a_strategy_has():
    layer, _, train_at = counted(8, max_age=100)
    train_at(0, [1, 2])
    for step in (100, 112):
        train_at(step, [2])
        assert known(layer, [1]) == [step == 100]


def test_rows_of_a_longer_run_grow_old_in_this_one():
    layer, steps, train_at = counted(8, max_age=100)
    train_at(5000, [1, 2])
    # Simulate a warm start.
    steps.assign(0)
    layer.rebuild()
    train_at(112, [2])
    assert known(layer, [1, 2]) == [False, True]


def test_rows_that_an_earlier_run_used_last_stay_longest():
    layer, steps, train_at = counted(4)
    for step, ids in ((100, [1, 2]), (150, [3, 4]), (200, [1, 2])):
        train_at(step, ids)
    for step in (0, 40):
        # Step 0 simulates a warm start, and step 40 a restart from a checkpoint of this run.
        steps.assign(step)
        layer.rebuild()
        trained(layer, [2])
    (shard,) = layer.parts
    assert shard.earlier.numpy() == 200
    trained(layer, [5, 6])
    assert known(layer, range(1, 7)) == [True, True, False, False, True, True]


def test_ages_go_on_where_all_rows_of_an_earlier_run_were_given_up():
    layer, steps, train_at = counted(8, min_count=2, max_age=100)
    for step, ids in ((0, [1, 1]), (5000, [])):
        train_at(step, ids)
    assert layer.metrics() == {"rows": 0, "evicted": 1, "turned_away": 0}
    # Simulate a warm start.
    steps.assign(0)
    layer.rebuild()
    for step, ids in ((10, [1, 1]), (20, [2, 2]), (115, [2])):
        train_at(step, ids)
    assert known(layer, [1, 2]) == [False, True]


def test_a_lookup_of_an_earlier_step_makes_no_row_older():
    layer, _, train_at = counted(8)
    train_at(50, [1])
    train_at(10, [1, 2])
    (shard,) = layer.parts
    places = [shard.noted.ids.numpy().tolist().index(each) for each in (1, 2)]
    assert shard.noted.used.numpy()[places].tolist() == [50, 10]


def test_the_step_is_read_when_the_ids_are_there():
    layer, steps, _ = counted(8, shards=2)
    graph = in_graph(layer).get_concrete_function().graph
    handle = next(inner for outer, inner in graph.captures if outer is steps.handle)
    reads = [op for op in handle.consumers() if op.type == "ReadVariableOp"]
    assert [[each.name for each in op.control_inputs] for op in reads] == [["ids"]]


@pytest.mark.parametrize("keys", KEYS)
def test_threads_that_bring_the_same_new_ids_make_one_row_of_each(keys):
    layer = table(400, shards=2, keys=keys)
    step = in_graph(layer)
    batches = [ids_of(layer, np.arange(n, n + 100)) for n in range(0, 100, 20)]
    step(batches[0])
    begun = threading.Barrier(2)

    def work():
        begun.wait()
        for batch in batches:
            step(batch)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert layer.metrics() == {"rows": 180, "evicted": 0, "turned_away": 0}
    rows = layer(ids_of(layer, range(180))).numpy()
    assert len(np.unique(rows, axis=0)) == 180


def test_no_mutex_is_released_after_another_one():
    layer = table(40, shards=2)
    step = tf.function(lambda ids: layer(ids, training=True) + layer(ids + 1, training=True))
    graph = step.get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    found = [op for op in graph.get_operations() if op.type == "ConsumeMutexLock"]
    assert len(found) == 4
    for op in found:
        assert not {each.type for each in op.control_inputs} & {"ConsumeMutexLock", "MutexLock"}
        # The lookup ends before the release, and the function ends after it.
        assert op.control_inputs
        assert op in graph.control_outputs


@pytest.mark.slow
def test_workers_that_look_up_two_tables_twice_do_not_wait_for_each_other():
    one, other = table(4000, shards=2), table(4000, shards=2)

    def step_of(first, second):
        def looked_up(history, item):
            found = [layer(history, training=True) for layer in (first, second)]
            again = [layer(item, training=True) for layer in (first, second)]
            return tf.add_n([tf.reduce_sum(each) for each in (*found, *again)])

        return tf.function(looked_up, reduce_retracing=True)

    steps = [step_of(one, other), step_of(other, one)]
    ids = np.random.default_rng(0).integers(0, 1000, (100, 2, 40))
    for step in steps:
        step(*tf.constant(ids[0]))
    ended = [threading.Event() for _ in steps]

    def work(step, end):
        for batch in ids:
            step(*tf.constant(batch))
        end.set()

    for step, end in zip(steps, ended, strict=True):
        # Use a daemon thread, so that the process can exit even if the thread waits forever.
        threading.Thread(target=work, args=(step, end), daemon=True).start()
    assert all(end.wait(300) for end in ended)
    known_ids = len(np.unique(ids))
    assert [layer.metrics()["rows"] for layer in (one, other)] == [known_ids] * 2


def test_its_variables_are_made_where_they_are_placed():
    given = []

    def create(next_creator, **kwargs):
        given.append(kwargs["initial_value"])
        return next_creator(**kwargs)

    with tf.variable_creator_scope(create):
        (shard,) = table(5).parts
    large = [each for each in given if not np.isscalar(each)]
    assert len(large) == 6
    assert all(map(callable, large))
    assert shard.free.numpy().tolist() == [4, 3, 2, 1, 0]


def test_of_two_slots_of_an_id_the_later_one_stays():
    layer = table(6)
    for ids in ([1], [2], [3]):
        trained(layer, ids)
    (shard,) = layer.parts
    first, _, later = (shard.noted.ids.numpy().tolist().index(each) for each in (1, 2, 3))
    expected = shard.noted.rows.numpy()[first]
    # Simulate a worker that dies before the slot of 3 is in the map.
    shard.noted.ids.value.scatter_nd_update([[later]], [1])
    trained(layer, [1])
    layer.rebuild()
    np.testing.assert_array_equal(layer(tf.constant([1])).numpy()[0], expected)
    assert shard.noted.used.numpy()[later] == -1
    trained(layer, [4, 5, 6, 7])
    assert known(layer, [1, 2, 4, 5, 6, 7]) == [True] * 6
    layer.shrink()
    np.testing.assert_array_equal(layer(tf.constant([1])).numpy()[0], expected)


def branch_with(graph, kind):
    """Return the operations by type in the graph that has an operation of the type `kind`."""
    graphs = [graph]
    for each in graphs:
        graphs.extend(inner.graph for inner in each._functions.values())
        found = {}
        for op in each.get_operations():
            found.setdefault(op.type, []).append(op)
        if kind in found:
            return found
    raise AssertionError(kind)


def before(op):
    """Return the names of all operations that `op` waits for."""
    found, left = set(), [op]
    while left:
        each = left.pop()
        for one in (*each.control_inputs, *(given.op for given in each.inputs)):
            if one.name not in found:
                found.add(one.name)
                left.append(one)
    return found


@pytest.mark.parametrize("keys", KEYS)
def test_a_worker_that_dies_leaves_no_id_a_slot_that_is_free(keys):
    layer, slot = table(8, keys=keys), tf.Variable(tf.zeros([9, DIMENSION]))
    layer.connect(tf.Variable(0, dtype=tf.int64), lambda _: [(slot, 0.0)])
    graph = in_graph(layer).get_concrete_function().graph
    found = branch_with(graph, "LookupTableInsertV2")
    (insert,), (room,) = found["LookupTableInsertV2"], found["AssignSubVariableOp"]
    written = found["ResourceScatterUpdate"]
    assert len(written) == (5 if keys == "string" else 4)
    assert all(op.name in before(insert) and room.name in before(op) for op in written)
    # A slot is marked as used only after its other fields are written.
    *others, used = sorted(written, key=lambda op: len(before(op)))
    assert all(op.name in before(used) for op in others)
    found = branch_with(graph, "LookupTableRemoveV2")
    (removed,), (room,) = found["LookupTableRemoveV2"], found["AssignAddVariableOp"]
    used, free = found["ResourceScatterUpdate"]
    assert removed.name in before(used)
    assert used.name in before(free)
    assert free.name in before(room)
