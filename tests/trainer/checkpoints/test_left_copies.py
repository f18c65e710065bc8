"""What a chief has left on the servers is used by the next one, or removed; other runs keep theirs.

All servers are this process. What survives a process is in `tests/cluster/test_left_copies.py`.
"""

from __future__ import annotations

import secrets
from unittest.mock import create_autospec

import numpy as np
import pytest
import tensorflow as tf

from trainer.checkpoints import joined, left_copies, snapshots
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.checkpoints.left_copies import left_on, run_of
from trainer.config.load import parse_config
from trainer.strategies.parameter_server import Served
from trainer.strategies.remade import Remade
from trainer.strategies.updates.touched_rows import RowGroup
from trainer.topology import Cluster, Task
from trainer.training.recovery import ServerSnapshots

ROWS = 6
SERVERS = range(2)


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Let this process be every server: the variables of each have its number in their paths."""
    for module in (snapshots, left_copies):
        monkeypatch.setattr(module, "server_device", lambda _: "/device:CPU:0")

    def held_by(variables):
        held = {server: {} for server in SERVERS}
        for path, each in variables.items():
            held[int(path.startswith("one"))][path] = each
        return held

    monkeypatch.setattr(joined, "held_by", held_by)


class Attempt(Served):
    """An attempt of a chief: a table with a slot on one server, and a counter on the other."""

    io_device = None
    build = run = None
    mixes_steps = True

    def __init__(self, uri, *, rows=ROWS, seconds=1.0, mixes=True, **sections):
        addresses = {"ps": tuple(f"localhost:{n}" for n in SERVERS)}
        tree = {"cluster": {"snapshot_seconds": seconds, **sections.pop("cluster", {})}, **sections}
        super().__init__(
            parse_config(tree), Cluster(addresses=addresses), Task(role="chief", index=0)
        )
        self.mixes_steps = mixes
        self.held = {
            joined.STEP: tf.Variable(0, dtype=tf.int64),
            "one/table": tf.Variable(tf.zeros([rows, 2])),
            "one/slot": tf.Variable(tf.zeros([rows])),
        }
        group = (self.held["one/table"], self.held["one/slot"])
        self.marks = tf.Variable(tf.ones([rows], tf.bool))
        self.row_groups = (RowGroup(variables=group, marks=self.marks),)
        self.checkpoints = create_autospec(Checkpoints, instance=True, uri=uri, published_step=-1)
        self.checkpoints.newest_step.return_value = -1
        self.snapshots = ServerSnapshots(self.config, self, self.checkpoints)

    def connect(self):
        """All servers are here."""

    def variables(self):
        return self.held

    def begin(self, saved):
        """Begin as the outer loop does; return the global step found, and whether it is used."""
        found = self.snapshots.find(saved)
        self.snapshots.begin()
        return found, self.snapshots.restore()

    def take(self, step, value=None):
        """Train to a global step, and take a snapshot of it."""
        self.held[joined.STEP].assign(step)
        for path in ("one/table", "one/slot"):
            each = self.held[path]
            each.assign(tf.fill(each.shape, float(step if value is None else value)))
        self.marks.assign(tf.ones_like(self.marks))
        self.snapshots._made.take(step)

    def values(self):
        return {path: np.unique(each).tolist() for path, each in self.held.items()}


@pytest.fixture
def uri():
    """Return that of a run, of which nothing stays in this process."""
    made = f"file:///{secrets.token_hex(8)}/checkpoints"
    yield made
    left_copies.forget(run_of(made), SERVERS)


def begun(uri, *steps, **given):
    """Return an attempt that took snapshots at steps, and is gone."""
    attempt = Attempt(uri, **given)
    attempt.begin(None)
    for step in steps:
        attempt.take(step)
    return attempt


def steps_left(uri):
    return {server: each.global_step for server, each in left_on(run_of(uri), SERVERS).items()}


def test_the_next_attempt_begins_with_the_copies(uri):
    begun(uri, 10, 20)
    attempt = Attempt(uri)
    assert attempt.begin(5) == (20, True)
    assert attempt.values() == {joined.STEP: [20], "one/table": [20.0], "one/slot": [20.0]}


def test_it_goes_on_with_their_memory_and_is_found_itself(uri):
    begun(uri, 10)
    before = left_on(run_of(uri), SERVERS)
    second = Attempt(uri)
    second.begin(5)
    # Before it has taken any of its own.
    assert Attempt(uri).snapshots.find(5) == 10
    second.take(30)
    after = left_on(run_of(uri), SERVERS)
    assert {each.token for each in after.values()} == {each.token for each in before.values()}
    third = Attempt(uri)
    assert third.begin(5) == (30, True)
    assert third.values()["one/slot"] == [30.0]


def test_a_server_that_is_lost_goes_back_to_what_was_left(uri):
    begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin(5)
    copied = attempt.snapshots.of({1}, 0.0)[1]
    assert copied.global_step == 10
    assert np.unique(copied.variables["one/slot"]).tolist() == [10.0]


def test_the_counter_is_of_the_step_that_was_read_before_it_was_copied(uri):
    attempt = begun(uri, 10)
    attempt.held[joined.STEP].assign(14)
    attempt.snapshots._made.take(12)
    attempt = Attempt(uri)
    assert attempt.begin(5) == (12, True)
    assert attempt.values()[joined.STEP] == [12]


def cut_short(attempt):
    """Let the chief die while a server assigns what it was sent."""
    copy = attempt.snapshots._made._copies[1]
    count, counted = copy.entry.count, []

    def once(writes):
        counted.append(writes)
        return count(writes) if len(counted) == 1 else None

    copy.entry.count = once
    copy._make_functions()
    attempt.marks.assign(tf.ones_like(attempt.marks))
    _, *found = copy._read_rows(tf.constant([0], tf.int64))
    copy._assign_rows(found)
    assert len(counted) == 2
    copy.entry.count = count
    copy._make_functions()


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_copy_that_was_being_written_is_not_used(uri, caplog, goes_on):
    attempt = begun(uri, 10)
    cut_short(attempt)
    if goes_on:
        # What was torn stays torn, however often it is written later.
        attempt.take(30)
        attempt.take(40)
    attempt = Attempt(uri)
    assert attempt.begin(5) == (5, False)
    assert attempt.values()["one/slot"] == [0.0]
    assert "are not used: one of them is not complete" in caplog.text
    assert set(steps_left(uri).values()) == {-1}


@pytest.mark.parametrize(
    ("given", "saved", "why"),
    [
        ({"seconds": 0.0, "cluster": {"recovery": "full"}}, 5, "is not set"),
        ({"mixes": False}, 5, "training is synchronous"),
        ({"seconds": 0.0, "data": {"partition": "dynamic"}}, 5, "is not set"),
        ({}, None, "no checkpoint is published"),
        ({"seconds": 0.0}, 5, "cluster.snapshot_seconds is not set"),
        ({"rows": ROWS + 1}, 5, "of other variables"),
        ({}, 10, ""),
        ({}, 11, ""),
    ],
)
def test_what_may_not_be_used_is_removed(uri, caplog, given, saved, why):
    begun(uri, 10)
    token = left_on(run_of(uri), SERVERS)[0].token
    attempt = Attempt(uri, **given)
    caplog.clear()
    begins = attempt.snapshots.find(saved)
    attempt.snapshots.begin()
    assert not attempt.snapshots.restore()
    assert begins == (10 if "rows" in given else saved or 0)
    assert ("are not used" in caplog.text, why in caplog.text) == (bool(why), True)
    assert attempt.values()["one/slot"] == [0.0]
    for server in SERVERS:
        assert not is_there(f"{run_of(uri)}-{server}-{token}-0")
    assert set(steps_left(uri).values()) == (set() if "seconds" in given else {-1})


def is_there(name):
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)
    return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def test_partial_recovery_of_synchronous_training_is_asked_for(uri):
    begun(uri, 10)
    attempt = Attempt(uri, mixes=False, cluster={"recovery": "partial"})
    assert attempt.begin(5) == (10, True)


def test_without_all_of_them_the_checkpoint_is_used(uri, caplog):
    begun(uri, 10)
    left_copies.forget(run_of(uri), [1])
    assert Attempt(uri).begin(5) == (5, False)
    assert "some of them are gone" in caplog.text


def test_an_attempt_that_died_before_its_first_snapshot_has_left_nothing(uri, caplog):
    begun(uri)
    assert Attempt(uri).begin(None) == (0, False)
    begun(uri)
    assert Attempt(uri).begin(5) == (5, False)
    assert "not used" not in caplog.text


def test_another_run_keeps_its_own(uri):
    other = f"{uri}-2"
    begun(other, 10)
    begun(uri, 20)
    attempt = Attempt(uri)
    attempt.begin(5)
    attempt.snapshots.end()
    assert steps_left(uri) == {}
    assert Attempt(other).begin(5) == (10, True)
    left_copies.forget(run_of(other), SERVERS)


def test_a_chief_of_another_form_does_not_read_them(uri, monkeypatch, caplog):
    begun(uri, 10)
    with monkeypatch.context() as later:
        later.setattr(left_copies, "FORM", left_copies.FORM + 1)
        attempt = Attempt(uri)
        assert attempt.begin(5) == (5, False)
        attempt.snapshots.end()
    assert "not used" not in caplog.text
    assert Attempt(uri).begin(5) == (10, True)


def test_a_chief_that_was_taken_for_dead_writes_nothing_any_more(uri):
    stalled = begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin(5)
    for _ in range(2):
        with pytest.raises(tf.errors.OpError):
            stalled.take(50)
    assert steps_left(uri) == {0: 10, 1: 10}
    last = Attempt(uri)
    assert last.begin(5) == (10, True)
    # And brings back nothing that was removed.
    last.snapshots.end()
    Attempt(uri).snapshots.find(5)
    with pytest.raises(tf.errors.OpError):
        stalled.take(60)
    assert steps_left(uri) == {}


def test_one_that_ends_late_removes_nothing_of_the_next(uri):
    stalled = begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin(5)
    stalled.snapshots.end()
    assert steps_left(uri) == {0: 10, 1: 10}
    attempt.take(30)
    assert Attempt(uri).begin(5) == (30, True)


def test_one_that_dies_before_it_has_the_values_leaves_them_to_the_next(uri):
    begun(uri, 10)
    second = Attempt(uri)
    second.snapshots.find(5)
    second.snapshots.begin()
    third = Attempt(uri)
    assert third.begin(5) == (10, True)
    assert third.values()["one/slot"] == [10.0]


@pytest.mark.parametrize(("there", "is_used"), [(5, False), (7, True), (9, True)])
def test_what_came_of_a_checkpoint_that_was_deleted_is_not_used(uri, caplog, there, is_used):
    attempt = begun(uri)
    attempt.checkpoints.published_step = 7
    attempt.take(10)
    attempt = Attempt(uri)
    # It may be there, and damaged.
    attempt.checkpoints.newest_step.return_value = there
    assert attempt.begin(5) == (10 if is_used else 5, is_used)
    assert ("a checkpoint that was published before them is gone" in caplog.text) != is_used
    attempt.snapshots._made.take(12)
    assert Attempt(uri).begin(5) == (12, True)


def test_slots_of_another_freeze_are_not_used(uri, caplog):
    begun(uri, 10, training={"freeze": ["one/*"]})
    assert Attempt(uri, training={"freeze": ["two/*"]}).begin(5) == (10, False)
    assert "or of another training.freeze" in caplog.text


def test_one_that_writes_while_they_are_read_leaves_the_checkpoint(uri, monkeypatch, caplog):
    stalled = begun(uri, 10)
    give_back = snapshots.give_back

    def meanwhile(*given):
        give_back(*given)
        stalled.take(50)

    monkeypatch.setattr(snapshots, "give_back", meanwhile)
    assert Attempt(uri).begin(5) == (10, False)
    assert "taken for dead" in caplog.text
    assert set(steps_left(uri).values()) == {-1}


def test_copies_on_a_server_that_was_started_again_are_found(uri, monkeypatch):
    attempt = begun(uri, 10)
    left_copies.forget(run_of(uri), SERVERS)
    remade = Remade([0, 1])
    monkeypatch.setattr(remade, "was_on", lambda _: True)
    attempt.snapshots.remake(remade)
    assert set(steps_left(uri).values()) == {-1}
    attempt.take(30)
    attempt = Attempt(uri)
    assert attempt.begin(5) == (30, True)
    assert attempt.values()["one/slot"] == [30.0]


def test_snapshots_that_fail_leave_no_memory(uri, monkeypatch):
    attempt = begun(uri, 10)

    def fails():
        raise tf.errors.ResourceExhaustedError(None, None, "no memory is left")

    monkeypatch.setattr(attempt.snapshots._made._copies[1], "take", fails)
    monkeypatch.setattr(attempt.snapshots._made, "is_due", lambda **_: True)
    attempt.snapshots.take_if_due(20, rests=False)
    assert steps_left(uri) == {}
