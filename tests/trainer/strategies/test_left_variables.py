"""What a chief has left on the servers is taken by the next one, or removed.

All servers are this process. What survives a process is in `tests/cluster/test_left_variables.py`.
"""

from __future__ import annotations

import secrets
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
import tensorflow as tf

from trainer.checkpoints import joined
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.config.load import parse_config
from trainer.models.embedding_table import EmbeddingTable
from trainer.strategies import left_variables
from trainer.strategies.left_variables import STEP, LeftVariables, MisfitError
from trainer.strategies.parameter_server import Served
from trainer.strategies.placement import Place, made_here
from trainer.strategies.remade import Remade
from trainer.strategies.turns import Turns
from trainer.strategies.updates.touched_rows import RowGroup
from trainer.topology import Cluster, Task
from trainer.training.recovery import ServerSnapshots

ROWS = 6
SERVERS = range(2)


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Let this process be every server."""
    monkeypatch.setattr(left_variables, "server_device", lambda _: "/device:CPU:0")
    monkeypatch.setattr(joined, "held_by", lambda _: {})


class Attempt(Served):
    """An attempt of a chief: a table with a slot, a counter, and a table that grows."""

    io_device = None
    build = run = None
    mixes_steps = leaves_variables = True

    def __init__(self, uri, *, rows=ROWS, mixes=True, places=(), **sections):
        addresses = {"ps": tuple(f"localhost:{n}" for n in SERVERS)}
        super().__init__(
            parse_config(sections), Cluster(addresses=addresses), Task(role="chief", index=0)
        )
        self.mixes_steps, self._places = mixes, [Place("", server) for server in places]
        self.held = {
            "table": tf.Variable(tf.zeros([rows, 2])),
            "slot": tf.Variable(tf.zeros([rows])),
            STEP: tf.Variable(0, dtype=tf.int64),
        }
        group = (self.held["table"], self.held["slot"])
        self.marks = tf.Variable(tf.ones([rows], tf.bool))
        self.row_groups = (RowGroup(variables=group, marks=self.marks),)
        self.grown = EmbeddingTable(8, 2, shards=1, name="grown")
        self.grown.build(None)
        self.grown.connect(self.held[STEP], lambda _: [])
        self.model = SimpleNamespace(_flatten_layers=lambda: [self.grown])
        (shard,) = self.grown.parts()
        for number, each in enumerate((shard.noted.rows, *shard.noted.bookkeeping())):
            self.held[f"grown/{number}"] = each.value
        self.checkpoints = create_autospec(Checkpoints, instance=True, uri=uri, published_step=-1)
        self.checkpoints.newest_step.return_value = -1
        self.snapshots = ServerSnapshots(self.config, self, self.checkpoints)
        self.turns = None

    def connect(self):
        """All servers are here."""

    def variables(self):
        return self.held

    def begin(self, saved):
        """Begin as the outer loop does; return the global step found, and whether it is used."""
        found = self.snapshots.find(saved)
        self.turns = Turns(1, self.held[STEP], self.left.permit if self.left else None)
        try:
            is_left = self.take_left(self.turns.held())
        except MisfitError:
            is_left = self.take_left(self.turns.held())
        if is_left:
            self.turns.resume()
        return found, self.snapshots.seconds_since_save() is not None

    def train(self, step):
        """Train to a global step."""
        self.settle(is_whole=True)
        self.held[STEP].assign(step)
        for path in ("table", "slot"):
            each = self.held[path]
            each.assign(tf.fill(each.shape, float(step)))
        self.grown(tf.constant([1, step]), training=True)
        self.marks.assign(tf.zeros_like(self.marks))

    def values(self):
        return {path: np.unique(self.held[path]).tolist() for path in (STEP, "table", "slot")}

    def places(self):
        """Return where the ids 10 and 20 have their rows; the last place is that of no row."""
        (shard,) = self.grown.parts()
        return shard._find(tf.constant([10, 20], tf.int64)).numpy().tolist()


@pytest.fixture
def uri():
    """Return that of a run, of which nothing stays in this process."""
    made = f"file:///{secrets.token_hex(8)}/checkpoints"
    yield made
    left = LeftVariables(made, len(SERVERS))
    left._free()


def begun(uri, *steps, **given):
    """Return an attempt that trained to steps, and is gone."""
    attempt = Attempt(uri, **given)
    attempt.begin(-1)
    for step in steps:
        attempt.train(step)
    return attempt


def join_again(attempt, monkeypatch, *others):
    """Let servers lose all that they had, and the chief make it again."""
    for each in [*attempt.variables().values(), *attempt.left._states, *others]:
        left_variables._destroy(each)
    remade = Remade(SERVERS, attempt.left.names)
    monkeypatch.setattr(remade, "was_on", lambda _: True)
    attempt.left.remake(remade)
    for each in attempt.variables().values():
        remade.variable(each)


def names_of(attempt):
    return [attempt.left._name(attempt.left._said, number) for number in (0, 1)]


def left_of(uri):
    return LeftVariables(uri, len(SERVERS))._found


def is_there(name):
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)
    return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def test_the_next_attempt_goes_on_with_the_values(uri):
    first = begun(uri, 10, 20)
    attempt = Attempt(uri)
    assert attempt.begin(5) == (20, True)
    assert attempt.values() == {STEP: [20], "table": [20.0], "slot": [20.0]}
    # Its graphs and those of the first one are of the same variables.
    first.held["slot"].assign(tf.fill([ROWS], 7.0))
    assert attempt.values()["slot"] == [7.0]


def test_a_table_that_grows_has_its_ids_without_looking_through_its_rows(uri):
    first = begun(uri, 10, 20)
    attempt = Attempt(uri)
    attempt.begin(5)
    places = attempt.places()
    assert places == first.places()
    assert sorted(places) == [1, 2]
    # Nothing of it is made again, as workers of the first one may have been at it.
    attempt.restored()
    assert attempt.places() == places
    attempt.train(30)
    assert first.grown.metrics()["rows"] == 4


def test_all_rows_count_as_changed_for_the_copies_of_the_next_attempt(uri):
    begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin(5)
    assert attempt.marks.numpy().all()


@pytest.mark.parametrize(
    ("places", "saved", "begins"), [((1, 0, 1), 5, 10), ((1, 0, 1), 30, 30), ((1, 2), 5, 5)]
)
def test_where_variables_are_is_known_before_they_are_made(uri, places, saved, begins):
    begun(uri, 10, places=places)
    attempt = Attempt(uri)
    # The places (1, 2) are of three servers.
    assert attempt.snapshots.find(saved) == begins
    assert list(attempt.left.places) == ([*places] if begins == 10 else [])


def test_what_was_made_here_and_is_not_used_is_moved(uri):
    begun(uri, 10)
    attempt = Attempt(uri)
    with made_here() as attempt._made_here:
        dropped = tf.Variable([3.0, 3.0])
    before = dropped.handle
    assert attempt.begin(5) == (10, True)
    assert dropped.handle is not before
    assert dropped.numpy().tolist() == [3.0, 3.0]


def test_it_is_found_itself_also_before_it_trains(uri):
    begun(uri, 10)
    Attempt(uri).begin(5)
    third = Attempt(uri)
    assert third.begin(5) == (10, True)
    third.train(30)
    assert Attempt(uri).begin(5) == (30, True)


def test_no_turn_of_the_first_one_is_taken_any_more(uri):
    first = begun(uri, 10)
    first.turns.deal(9)
    own = first.turns.begin(tf.constant(0, tf.int64))
    assert bool(first.turns.take(own))
    attempt = Attempt(uri)
    attempt.begin(5)
    assert not bool(first.turns.take(own))
    attempt.turns.deal(9)
    assert not bool(first.turns.take(own))
    assert bool(attempt.turns.take(attempt.turns.begin(tf.constant(0, tf.int64))))


@pytest.mark.parametrize(
    ("given", "saved", "why"),
    [
        ({"cluster": {"recovery": "full"}}, 5, "cluster.recovery is full"),
        ({"mixes": False}, 5, "training is synchronous"),
        ({"data": {"partition": "dynamic"}}, 5, "data.partition is dynamic"),
        ({}, -1, "no checkpoint is published"),
        ({"rows": ROWS + 1}, 5, "of other variables"),
        ({"training": {"freeze": ["two/*"]}}, 5, "snapshots or training.freeze"),
        ({"training": {"optimizer": {"name": "sgd"}}}, 5, "of other variables"),
        ({"cluster": {"placement": {"two": "ps:0"}}}, 5, "of other variables"),
        ({}, 11, "the newest checkpoint is newer"),
    ],
)
def test_what_may_not_be_used_is_removed(uri, caplog, given, saved, why):
    first = begun(uri, 10)
    names = names_of(first)
    attempt = Attempt(uri, **given)
    caplog.clear()
    begins, is_used = attempt.begin(saved)
    assert not is_used
    assert begins == (10 if "other variables" in why or "freeze" in why else max(saved, 0))
    assert ("is not used" in caplog.text, why in caplog.text) == (True, True)
    assert attempt.values() == {STEP: [0], "table": [0.0], "slot": [0.0]}
    assert not any(map(is_there, names))
    assert attempt.places() == [-1, -1]
    assert not Attempt(uri).begin(0)[1]


@pytest.mark.parametrize(("there", "is_used"), [(5, False), (7, True), (9, True)])
def test_what_came_of_a_checkpoint_that_was_deleted_is_not_used(uri, caplog, there, is_used):
    attempt = begun(uri, 10)
    attempt.checkpoints.published_step = 7
    attempt.snapshots.take_if_due(10, rests=False)
    attempt = Attempt(uri)
    # It may be there, and damaged.
    attempt.checkpoints.newest_step.return_value = there
    assert attempt.begin(5) == (10 if is_used else 5, is_used)
    assert ("a checkpoint that was published before is gone" in caplog.text) != is_used


def test_partial_recovery_of_synchronous_training_is_asked_for(uri):
    begun(uri, 10)
    attempt = Attempt(uri, mixes=False, cluster={"recovery": "partial"})
    assert attempt.begin(5) == (10, True)


def test_a_strategy_that_leaves_nothing_gives_no_names(uri):
    attempt = Attempt(uri)
    attempt.leaves_variables = False
    assert attempt.begin(-1) == (0, False)
    attempt.train(10)
    assert left_of(uri) == {}


def test_values_that_the_chief_was_assigning_are_not_used(uri, caplog):
    begun(uri, 10).settle(is_whole=False)
    assert Attempt(uri).begin(5) == (5, False)
    assert "the chief was assigning values" in caplog.text


def test_an_attempt_that_died_before_it_trained_has_left_nothing(uri, caplog):
    begun(uri)
    assert Attempt(uri).begin(5) == (5, False)
    assert "the chief was assigning values" in caplog.text


@pytest.mark.parametrize("lost", SERVERS)
def test_without_what_one_server_had_the_checkpoint_is_used(uri, caplog, lost):
    first = begun(uri, 10)
    left_variables._destroy(first.left._states[lost])
    assert Attempt(uri).begin(5) == (5, False)
    assert "a server was started again" in caplog.text
    assert not is_there(first.left._name(first.left._said, 1))


def test_what_servers_have_of_different_attempts_is_not_used(uri, caplog):
    first = begun(uri, 10)
    other = replace(first.left._said, token=1)
    first.left._states[1].assign(list(vars(other).values()))
    assert Attempt(uri).begin(5) == (5, False)
    assert "a server was started again" in caplog.text


def test_another_run_keeps_its_own(uri):
    other = f"{uri}-2"
    begun(other, 10)
    begun(uri, 20)
    attempt = Attempt(uri)
    attempt.begin(5)
    attempt.snapshots.end()
    assert left_of(uri) == {}
    last = Attempt(other)
    assert last.begin(5) == (10, True)
    last.snapshots.end()


def test_a_chief_of_another_form_does_not_find_it(uri, monkeypatch, caplog):
    begun(uri, 10)
    with monkeypatch.context() as later:
        later.setattr(left_variables, "FORM", left_variables.FORM + 1)
        attempt = Attempt(uri)
        assert attempt.begin(5) == (5, False)
        attempt.snapshots.end()
    assert "is not used" not in caplog.text
    assert Attempt(uri).begin(5) == (10, True)


def test_a_chief_that_was_taken_for_dead_changes_nothing_any_more(uri):
    stalled = begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin(5)
    for change in (
        lambda: stalled.turns.deal(9),
        lambda: stalled.turns.extend(9),
        lambda: stalled.settle(is_whole=False),
        lambda: stalled.left.note(8),
    ):
        with pytest.raises(tf.errors.OpError):
            change()
    stalled.snapshots.end()
    assert attempt.turns.look().taken == 0
    assert Attempt(uri).begin(5) == (10, True)


def test_at_its_end_it_frees_all(uri):
    attempt = begun(uri, 10)
    names = names_of(attempt)
    assert all(map(is_there, names))
    attempt.snapshots.end()
    assert not any(map(is_there, names))
    assert left_of(uri) == {}


def test_how_long_ago_it_was_saved_goes_on(uri, monkeypatch):
    attempt = begun(uri, 10)
    now = left_variables.time.time()
    monkeypatch.setattr(left_variables.time, "time", lambda: now)
    attempt.checkpoints.published_step = 7
    attempt.snapshots.take_if_due(10, rests=False)
    assert attempt.snapshots.seconds_since_save() is None
    monkeypatch.setattr(left_variables.time, "time", lambda: now + 30)
    attempt = Attempt(uri)
    attempt.checkpoints.newest_step.return_value = 7
    attempt.begin(5)
    assert attempt.snapshots.seconds_since_save() == pytest.approx(30, abs=1)


def test_what_servers_had_that_were_started_again_keeps_its_names(uri, monkeypatch):
    attempt = begun(uri, 10)
    names = dict(attempt.left.names)
    join_again(attempt, monkeypatch)
    assert attempt.left.names == names
    # Before they have values again, none is left.
    assert attempt.left._find()[0].is_whole == 0
    attempt.train(30)
    assert Attempt(uri).begin(5) == (30, True)


def test_a_chief_that_dies_as_a_server_is_joined_leaves_the_checkpoint(uri, monkeypatch, caplog):
    attempt = begun(uri, 10)
    join_again(attempt, monkeypatch)
    assert Attempt(uri).begin(5) == (5, False)
    assert "the chief was assigning values" in caplog.text


def test_one_that_was_taken_for_dead_joins_no_server(uri):
    stalled = begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin(5)
    with pytest.raises(tf.errors.OpError):
        stalled.left.remake(Remade([1], stalled.left.names))
    attempt.train(20)
    assert Attempt(uri).begin(5) == (20, True)


class Killed(BaseException):
    """The chief is killed."""


def killed_in(monkeypatch, method, work):
    """Do work of which a method of `LeftVariables` does its own, and then the chief is killed."""
    done = getattr(LeftVariables, method)

    def dies(*given):
        done(*given)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(LeftVariables, method, dies)
        with pytest.raises(Killed):
            work()


def test_what_has_names_in_part_is_freed_by_the_next(uri, monkeypatch):
    attempt = Attempt(uri)
    killed_in(monkeypatch, "_rename_all", lambda: attempt.begin(-1))
    names = names_of(attempt)
    assert all(map(is_there, names))
    assert Attempt(uri).begin(5) == (5, False)
    assert not any(map(is_there, names))


def test_what_is_freed_in_part_is_freed_by_the_next(uri, monkeypatch):
    attempt = begun(uri, 10)
    attempt.left._found = attempt.left._find()
    # Of the first server.
    killed_in(monkeypatch, "_freeing", attempt.left._free)
    last = Attempt(uri)
    assert last.begin(5) == (5, False)
    assert not any(map(is_there, names_of(attempt)))
    last.snapshots.end()
    assert left_of(uri) == {}


def test_a_value_is_not_kept_twice(uri):
    attempt = Attempt(uri)
    before = weakref.ref(attempt.held["table"].handle)
    attempt.begin(-1)
    assert before() is None
