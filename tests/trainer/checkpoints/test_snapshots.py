"""Copies of servers on other tasks: what has changed is copied, whole or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.checkpoints import snapshots
from trainer.checkpoints.snapshots import Snapshots
from trainer.models.embedding_table import EmbeddingTable
from trainer.strategies import table_state
from trainer.strategies.updates import touched_rows
from trainer.strategies.updates.touched_rows import RowGroup, row_groups

ROWS = 10


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Let this process be every server."""
    monkeypatch.setattr(snapshots, "server_device", lambda _: "/device:CPU:0")


def held(servers=2):
    """Return a table with a slot, and a number, on each server."""
    return {
        server: {
            "table": tf.Variable(tf.zeros([ROWS, 2])),
            "slot": tf.Variable(tf.zeros([ROWS])),
            "number": tf.Variable(0, dtype=tf.int64),
        }
        for server in range(servers)
    }


def group_of(own, *, marked=True):
    marks = tf.Variable(tf.ones([ROWS], tf.bool)) if marked else None
    return RowGroup(variables=(own["table"], own["slot"]), marks=marks)


def made(variables, groups=(), seconds=1.0):
    return Snapshots(variables, groups, None, seconds)


def copies(of, lost, noticed=0.0):
    return {
        server: {path: each.numpy().tolist() for path, each in found.variables.items()}
        for server, found in of.of(lost, noticed).items()
    }


def move(own, group, row, value, *, marked=True):
    """Update a row and its slot, as an optimizer does."""
    own["table"].scatter_update(tf.IndexedSlices(tf.fill([1, 2], value), [row]))
    own["slot"].scatter_update(tf.IndexedSlices(tf.fill([1], value), [row]))
    if marked:
        group.marks.scatter_update(tf.IndexedSlices(tf.constant([True]), [row]))


def with_marks(server):
    """Return what a server holds, its table with marks, and snapshots of which one is taken."""
    variables = held()
    own = variables[server]
    group = group_of(own)
    found = made(variables, [group])
    found.take(10)
    assert not group.marks.numpy().any()
    return own, group, found


def test_what_a_server_holds_is_copied_and_stays_as_it_was():
    variables = held()
    found = made(variables)
    variables[0]["number"].assign(7)
    found.take(30)
    variables[0]["number"].assign(8)
    (copied,) = found.of({0}, 0.0).values()
    assert copied.global_step == 30
    assert copied.variables.keys() == variables[0].keys()
    assert copied.variables["number"].numpy() == 7
    found.take(40)
    (copied,) = found.of({0}, 0.0).values()
    assert (copied.global_step, copied.variables["number"].numpy()) == (40, 8)


def test_only_marked_rows_are_copied_again_with_their_slots():
    own, group, found = with_marks(1)
    move(own, group, 3, 1.0)
    move(own, group, 4, 2.0, marked=False)
    found.take(20)
    copied = copies(found, {1})[1]
    assert [row[0] for row in copied["table"]] == copied["slot"] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert not group.marks.numpy().any()


def test_rows_of_which_each_update_moves_all_are_copied_all():
    variables = held()
    own = variables[0]
    found = made(variables, [group_of(own, marked=False)])
    found.take(10)
    own["table"].assign(tf.ones([ROWS, 2]))
    found.take(20)
    assert copies(found, {0})[0]["table"] == [[1, 1]] * ROWS


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("rows", [1, 3, ROWS - 1, ROWS])
def test_rows_come_in_portions_until_all_are_there(monkeypatch, rows, marked):
    monkeypatch.setattr(snapshots, "PORTION", rows * 12)
    variables = held()
    own = variables[0]
    own["table"].assign(tf.reshape(tf.range(2.0 * ROWS), [ROWS, 2]))
    own["slot"].assign(tf.range(float(ROWS)))
    found = made(variables, [group_of(own, marked=marked)])
    copy = found._copies[0]
    assert copy._most == [rows]
    found.take(10)
    copied = copies(found, {0})[0]
    assert copied == {path: each.numpy().tolist() for path, each in own.items()}


def between(copy, work):
    """Do something after the first portion of rows was read, and before it is assigned."""
    assign, done = copy._assign_rows, []

    def later(found):
        if not done:
            done.append(work())
        assign(found)

    copy._assign_rows = later


def test_an_update_while_rows_are_copied_is_in_the_next_snapshot():
    variables = held()
    own = variables[0]
    group = group_of(own)
    found = made(variables, [group])
    between(found._copies[0], lambda: move(own, group, 5, 9.0))
    found.take(10)
    assert copies(found, {0})[0]["slot"][5] == 0
    assert np.flatnonzero(group.marks.numpy()).tolist() == [5]
    found.take(20)
    assert copies(found, {0})[0]["slot"][5] == 9


def test_a_server_that_dies_while_it_is_read_leaves_the_copy_before():
    own, group, found = with_marks(0)

    def gone(*_):
        raise tf.errors.UnavailableError(None, None, "ps-0 is gone")

    for name, row in (("_read_whole", 1), ("_read_rows", 2)):
        move(own, group, row, 5.0)
        reads = getattr(found._copies[0], name)
        setattr(found._copies[0], name, gone)
        with pytest.raises(tf.errors.UnavailableError, match="gone"):
            found.take(20)
        setattr(found._copies[0], name, reads)
        (copied,) = found.of({0}, 0.0).values()
        assert copied.global_step == 10
        assert not copied.variables["slot"].numpy().any()
        assert not copied.variables["table"].numpy().any()


def test_the_copy_of_a_server_is_on_the_next_one():
    found = made(held(3))
    assert {server: each.peer for server, each in found._copies.items()} == {0: 1, 1: 2, 2: 0}
    size = ROWS * 3 * 4 + 8
    assert found.sizes() == dict.fromkeys(("ps-0", "ps-1", "ps-2"), (size, size))
    assert found.of({0}, 0.0) == {}
    found.take(10)
    assert set(found.of({0}, 0.0)) == {0}
    # That of the second was on the third.
    assert set(found.of({1, 2}, 0.0)) == {2}
    assert set(found.of({0, 1, 2}, 0.0)) == set()


@pytest.mark.parametrize(("rows", "more"), [(1, 12), (4, 48), (2 * ROWS, ROWS * 12)])
def test_what_is_on_its_way_is_a_portion_of_rows_or_all_that_is_copied_whole(
    monkeypatch, rows, more
):
    monkeypatch.setattr(snapshots, "PORTION", rows * 12)
    variables = held(1)
    size = ROWS * 12 + 8
    assert made(variables, [group_of(variables[0])]).sizes() == {"the chief": (size, more)}
    variables[0]["other"] = tf.Variable(tf.zeros([ROWS, 3]))
    more = max(more, ROWS * 12 + 8)
    (found,) = made(variables, [group_of(variables[0])]).sizes().values()
    assert found == (size + ROWS * 12, more)


def test_the_copy_of_a_single_server_is_on_the_chief():
    found = made(held(1))
    assert list(found.sizes()) == ["the chief"]
    found.take(10)
    assert set(found.of({0}, 0.0)) == {0}


def test_a_server_without_variables_holds_no_copy():
    variables = held(2)
    found = made({0: variables[0], 3: variables[1]})
    assert {server: each.peer for server, each in found._copies.items()} == {0: 3, 3: 0}


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(snapshots, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_it_is_due_about_every_so_many_seconds(clock):
    found = made(held(), seconds=5)
    assert found.is_due(rests=True)
    found.take(10)
    clock.now += 4.9
    assert not found.is_due(rests=False)
    clock.now += 0.2
    assert found.is_due(rests=False)
    # Workers that rest for a checkpoint are not to wait for it.
    assert not found.is_due(rests=True)
    clock.now += 5
    assert found.is_due(rests=True)


def test_slow_copies_take_no_more_than_half_of_the_time(clock):
    found = made(held(), seconds=1)

    def slow():
        clock.now += 10

    found._copies[0].take = slow
    found.take(10)
    # The first one traces its functions, and copies all rows.
    assert found.is_due(rests=False)
    found.take(20)
    clock.now += 9.9
    assert not found.is_due(rests=False)
    clock.now += 0.2
    assert found.is_due(rests=False)


def test_its_age_is_that_of_its_beginning_when_the_loss_was_noticed(clock):
    found = made(held())
    found.take(10)
    (copied,) = found.of({1}, clock.now + 1.5).values()
    assert copied.age == 1.5
    # 0 would mean a checkpoint.
    (copied,) = found.of({1}, clock.now).values()
    assert copied.age > 0


@pytest.fixture
def grown(monkeypatch):
    """Return a trained model with a table that grows, and a function that trains it on ids."""
    monkeypatch.setattr(touched_rows, "SMALL", 0)
    keras.utils.set_random_seed(0)
    given = keras.Input((), dtype="int64")
    layer = EmbeddingTable(6, 2, shards=1, min_age=0, name="t")
    model = keras.Model(given, layer(given))
    optimizer = keras.optimizers.Adagrad(0.1)
    optimizer.build(model.trainable_variables)
    touched_rows.update_touched_rows(optimizer)
    table_state.connect(model, optimizer, optimizer.iterations.value)
    training = SimpleNamespace(optimizer=SimpleNamespace(dense_updates=False), ema=0)
    groups = row_groups(model, optimizer, training, pulled=False)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids, training=True) ** 2)
        (gradient,) = tape.gradient(loss, [layer.trainable_variables[0].value])
        optimizer.apply(
            [tf.IndexedSlices(*touched_rows_once(gradient), gradient.dense_shape)],
            layer.trainable_variables,
        )

    variables = {each.path: each.value for each in (*model.variables, *optimizer.variables)}
    return SimpleNamespace(
        layer=layer,
        variables=variables,
        groups=groups,
        step=lambda ids: step(tf.constant(ids, tf.int64)),
    )


def touched_rows_once(gradient):
    rows, places = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows)), rows


def test_a_table_that_grows_is_found_again_in_its_copy(grown):
    found = made({0: grown.variables}, grown.groups)
    (group,) = grown.groups
    names = {
        path for path, each in grown.variables.items() if any(each is v for v in group.variables)
    }
    assert {each.rpartition("_")[2] for each in names} == {"rows", "ids", "used", "accumulator"}
    # The last of them take the rows of others.
    for number, ids in enumerate(([1, 2, 3], [4, 4], [], [5, 6, 7], [3, 8, 8])):
        if ids:
            grown.step(ids)
        found.take(number)
        (copied,) = found.of({0}, 0.0).values()
        for path, each in grown.variables.items():
            np.testing.assert_array_equal(copied.variables[path].numpy(), each.numpy(), path)
        assert not group.marks.numpy().any()
    asked = tf.range(10, dtype=tf.int64)
    expected = grown.layer(asked, training=False).numpy()
    grown.step([9, 1])
    for path, each in grown.variables.items():
        each.assign(copied.variables[path])
    grown.layer.restored()
    np.testing.assert_array_equal(grown.layer(asked, training=False).numpy(), expected)


def test_a_table_is_not_locked_before_it_is_known_which_rows_are_read(grown):
    found = made({0: grown.variables}, grown.groups)
    graph = found._copies[0]._read_rows.get_concrete_function().graph
    (lock,) = (each for each in graph.get_operations() if each.type == "MutexLock")
    before, seen = [lock], set()
    while before:
        each = before.pop()
        seen.add(each.name)
        before += [*each.control_inputs, *(tensor.op for tensor in each.inputs)]
    assert graph.inputs[0].op.name in seen


class Gone:
    """What servers held that are started again, which are some variables of this process."""

    def __init__(self, *lost):
        self.lost = [id(each) for each in lost]

    def variable(self, variable):
        """Say whether it is gone."""
        return id(variable) in self.lost


def test_copies_that_are_gone_with_their_server_are_made_of_all_rows_again():
    own, group, found = with_marks(0)
    peer_of_0 = found.of({0}, 0.0)[0].variables
    found.remake(Gone(*peer_of_0.values()))
    assert found.of({0}, 0.0) == {}
    assert found.of({1}, 0.0)[1].global_step == 10
    assert group.marks.numpy().all()
    assert found.is_due(rests=True)
    for each in peer_of_0.values():
        each.assign(tf.zeros_like(each))
    own["number"].assign(3)
    found.take(20)
    assert copies(found, {0}) == {0: {path: each.numpy().tolist() for path, each in own.items()}}


@pytest.mark.parametrize("portion", [1, 40, 100, 1 << 20])
def test_what_was_copied_is_given_back_in_portions(monkeypatch, portion):
    monkeypatch.setattr(snapshots, "PORTION", portion)
    copies_ = {
        "table": tf.Variable(np.arange(20.0, dtype=np.float32).reshape(ROWS, 2)),
        "slot": tf.Variable(np.arange(10.0, dtype=np.float32)),
        "number": tf.Variable([7], dtype=tf.int64),
    }
    variables = {path: tf.Variable(tf.zeros_like(each)) for path, each in copies_.items()}
    snapshots.give_back(copies_, variables, None)
    for path, each in copies_.items():
        np.testing.assert_array_equal(variables[path], each)
