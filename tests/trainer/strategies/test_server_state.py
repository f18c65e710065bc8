"""Tests that the next attempt reuses or removes what an earlier one left on the servers.

This process acts as every server.
"""

import secrets
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task, find_topology
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies import server_state
from flotilla.trainer.strategies.async_parameter_server import Turns
from flotilla.trainer.strategies.parameter_server import Served
from flotilla.trainer.strategies.placement import KeptValues
from flotilla.trainer.strategies.server_state import STEP, MisfitError, ServerState

ROWS = 6
SERVERS = range(2)


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    """Use this process as every server."""
    monkeypatch.setattr(server_state, "server_device", lambda _: "/device:CPU:0")
    monkeypatch.setattr(server_state, "_find_server", lambda _: 0)


class Attempt(Served):
    """An attempt of a chief with a table, its optimizer slot, a counter, and a dynamic table."""

    io_device = None
    run = None
    capabilities = find_topology("async_parameter_server").capabilities

    def __init__(self, uri, *, rows=ROWS, **sections):
        addresses = {"ps": tuple(f"localhost:{n}" for n in SERVERS)}
        super().__init__(
            parse_config(sections), Cluster(addresses=addresses), Task(role="chief", index=0)
        )
        self.held = {
            "table": tf.Variable(tf.zeros([rows, 2])),
            "slot": tf.Variable(tf.zeros([rows])),
            STEP: tf.Variable(0, dtype=tf.int64),
        }
        self.grown = EmbeddingTable(8, 2, shards=1, name="grown")
        self.grown.build(None)
        self.grown.connect(self.held[STEP], lambda _: [])
        self.model, self._kept = SimpleNamespace(_flatten_layers=lambda: [self.grown]), KeptValues()
        (shard,) = self.grown.parts
        for number, each in enumerate((shard.noted.rows, *shard.noted.bookkeeping())):
            self.held[f"grown/{number}"] = each.value
        self.uri = uri

    def connect(self):
        """Do not connect, because all servers are in this process."""

    def variables(self):
        return self.held

    def begin(self, *, takes=True):
        """Start with the existing state; return the servers whose values are reused."""
        state = self.find_state(self.uri)
        if takes:
            state.select(state.living)
        elif state.found:
            state.remove("why")
        self.turns = Turns(1, self.held[STEP], state.permit)
        try:
            self.keep(self.turns.list_variables())
        except MisfitError:
            self.keep(self.turns.list_variables())
        if state.taken:
            self.turns.extend(0)
        return sorted(state.taken)

    def train(self, step):
        self.settle(is_whole=True)
        self.held[STEP].assign(step)
        for path in ("table", "slot"):
            each = self.held[path]
            each.assign(tf.fill(each.shape, float(step)))
        self.grown(tf.constant([1, step]), training=True)

    def values(self):
        return {path: np.unique(self.held[path]).tolist() for path in (STEP, "table", "slot")}

    def places(self):
        """Return the slots of the ids 10 and 20; the last slot belongs to ids without a row."""
        (shard,) = self.grown.parts
        return shard._find(tf.constant([10, 20], tf.int64)).numpy().tolist()


@pytest.fixture
def uri():
    """Yield the URI of a run; afterwards, free the run's variables in this process."""
    made = f"file:///{secrets.token_hex(8)}/checkpoints"
    yield made
    left = ServerState(made, len(SERVERS))
    left._free(left.found)


def begun(uri, *steps, **given):
    """Return an attempt that has trained to each of these steps and has ended."""
    attempt = Attempt(uri, **given)
    attempt.begin()
    for step in steps:
        attempt.train(step)
    return attempt


def names_of(attempt):
    state = attempt.state
    return [state._name(state._said[0].token, number) for number in (0, 1)]


def is_there(name):
    handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=name)
    return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def lose(attempt, server):
    """Simulate a restart of a server by removing its record."""
    server_state._destroy(attempt.state._states[server])


def test_the_next_attempt_goes_on_with_the_values(uri):
    first = begun(uri, 10, 20)
    attempt = Attempt(uri)
    assert attempt.begin() == [0, 1]
    assert attempt.state.read_reached() == 20
    assert attempt.values() == {STEP: [20], "table": [20.0], "slot": [20.0]}
    # The graphs of the first attempt use the same variables as this one.
    first.held["slot"].assign(tf.fill([ROWS], 7.0))
    assert attempt.values()["slot"] == [7.0]


def test_a_table_that_grows_has_its_ids_without_looking_through_its_rows(uri):
    first = begun(uri, 10, 20)
    attempt = Attempt(uri)
    attempt.begin()
    places = attempt.places()
    assert places == first.places()
    assert sorted(places) == [1, 2]
    # Nothing is recreated, because workers of the first attempt may still use it.
    attempt.refresh()
    assert attempt.places() == places
    attempt.train(30)
    assert first.grown.metrics()["rows"] == 4


def test_it_is_found_itself_also_before_it_trains(uri):
    begun(uri, 10)
    Attempt(uri).begin()
    third = Attempt(uri)
    assert third.begin() == [0, 1]
    third.train(30)
    last = Attempt(uri)
    assert last.begin() == [0, 1]
    assert last.state.read_reached() == 30


def test_no_turn_of_the_first_one_is_taken_any_more(uri):
    first = begun(uri, 10)
    first.turns.deal(9)
    own = first.turns.begin(tf.constant(0, tf.int64))
    assert bool(first.turns.take(own))
    attempt = Attempt(uri)
    attempt.begin()
    assert not bool(first.turns.take(own))
    attempt.turns.deal(9)
    assert not bool(first.turns.take(own))
    assert bool(attempt.turns.take(attempt.turns.begin(tf.constant(0, tf.int64))))


@pytest.mark.parametrize(
    "given",
    [
        {"rows": ROWS + 1},
        {"training": {"freeze": ["two/*"]}},
        {"training": {"optimizer": {"name": "sgd"}}},
        {"cluster": {"placement": {"two": "ps:0"}}},
    ],
)
def test_what_is_of_other_variables_is_removed(uri, caplog, given):
    first = begun(uri, 10)
    names = names_of(first)
    attempt = Attempt(uri, **given)
    assert attempt.begin() == []
    assert "the variables, the workers or training.freeze have changed" in caplog.text
    assert attempt.values() == {STEP: [0], "table": [0.0], "slot": [0.0]}
    assert not any(map(is_there, names))
    assert attempt.places() == [-1, -1]
    assert Attempt(uri).begin() == []


def test_a_model_that_cannot_be_built_for_what_is_there_is_built_anew(uri, caplog):
    begun(uri, 10)
    attempt, taken = Attempt(uri), []
    state = attempt.find_state(uri)
    state.select(state.living)

    def build(_problem):
        taken.append(sorted(state.taken))
        if state.taken:
            raise ConfigError("the weight is all zeros")

    attempt.build_on_servers = build
    attempt.build(None)
    assert taken == [[0, 1], []]
    assert "the weight is all zeros" in caplog.text


def test_what_is_not_wanted_is_removed(uri, caplog):
    names = names_of(begun(uri, 10))
    attempt = Attempt(uri)
    assert attempt.begin(takes=False) == []
    assert "of an earlier attempt are not used: why" in caplog.text
    assert attempt.values() == {STEP: [0], "table": [0.0], "slot": [0.0]}
    assert not any(map(is_there, names))


def test_a_strategy_that_keeps_nothing_gives_no_names(uri):
    class Other(Attempt):
        capabilities = find_topology("single").capabilities

    attempt = Other(uri)
    assert attempt.find_state(uri) is None
    attempt.keep({})
    assert ServerState(uri, len(SERVERS)).found == {}


@pytest.mark.parametrize("steps", [(), (10,)])
def test_values_that_the_chief_was_assigning_do_not_live(uri, steps):
    attempt = begun(uri, *steps)
    attempt.state.note(5, 10)
    attempt.settle(is_whole=False)
    state = Attempt(uri).find_state(uri)
    assert set(state.found) == set(SERVERS)
    assert (state.living, state.read_reached()) == (frozenset(), 10)


@pytest.mark.parametrize(("lost", "reached"), [(0, 9), (1, 10)])
def test_a_server_that_was_started_again_does_not_live(uri, lost, reached):
    first = begun(uri, 10)
    first.state.note(5, 9)
    lose(first, lost)
    # The counter is exact if it survived; otherwise the step that the chief last read is used.
    assert Attempt(uri).find_state(uri).read_reached() == reached
    attempt = Attempt(uri)
    assert attempt.begin() == [1 - lost]
    assert ServerState(uri, len(SERVERS)).found.keys() == set(SERVERS)
    assert attempt.state.taken == {1 - lost}


def test_a_chief_that_dies_while_it_restores_leaves_what_is_alive(uri):
    lose(begun(uri, 10), 1)
    second = Attempt(uri)
    assert second.begin() == [0]
    # The chief did not record that the values on the other server are complete.
    third = Attempt(uri)
    assert third.begin() == [0]
    third.settle(is_whole=True)
    assert Attempt(uri).begin() == [0, 1]


def test_what_went_back_is_noted_until_a_later_checkpoint_is_published(uri):
    lose(begun(uri, 10), 1)
    second = Attempt(uri)
    second.begin()
    second.state.note_reverted(5)
    assert second.state.list_reverted() == {1: 5}
    # A checkpoint that was on its way does not have what went back to it.
    second.state.note(5, 12)
    second.settle(is_whole=True)
    third = Attempt(uri)
    third.begin()
    for attempt in (second, third):
        assert attempt.state.list_reverted() == {1: 5}
    third.state.note(12, 14)
    assert third.state.list_reverted() == {}


def test_what_servers_have_of_different_runs_of_values_does_not_live(uri):
    first = begun(uri, 10)
    other = {**vars(first.state._said[1]), "token": 1}
    first.state._states[1].assign(list(other.values()))
    assert Attempt(uri).find_state(uri).living == frozenset()


def test_another_run_keeps_its_own(uri):
    other = f"{uri}-2"
    begun(other, 10)
    begun(uri, 20)
    attempt = Attempt(uri)
    attempt.begin()
    attempt.state.forget()
    assert ServerState(uri, len(SERVERS)).found == {}
    last = Attempt(other)
    assert last.begin() == [0, 1]
    last.state.forget()


def test_a_chief_of_another_form_does_not_find_it(uri, monkeypatch):
    begun(uri, 10)
    with monkeypatch.context() as later:
        later.setattr(server_state, "FORM", server_state.FORM + 1)
        attempt = Attempt(uri)
        assert attempt.begin() == []
        attempt.state.forget()
    assert Attempt(uri).begin() == [0, 1]


def test_a_chief_that_was_taken_for_dead_changes_nothing_any_more(uri):
    stalled = begun(uri, 10)
    attempt = Attempt(uri)
    attempt.begin()
    for change in (
        lambda: stalled.turns.deal(9),
        lambda: stalled.turns.extend(9),
        lambda: stalled.settle(is_whole=False),
        lambda: stalled.state.note(8, 9),
    ):
        with pytest.raises(tf.errors.OpError):
            change()
    stalled.state.forget()
    assert attempt.turns.look().taken == 0
    assert Attempt(uri).begin() == [0, 1]


def test_a_chief_that_was_taken_for_dead_frees_nothing_before_the_next_takes_it(uri):
    stalled = begun(uri, 10)
    attempt = Attempt(uri)
    attempt.find_state(uri)
    stalled.state.forget()
    assert attempt.begin() == [0, 1]
    assert attempt.values() == {STEP: [10], "table": [10.0], "slot": [10.0]}


def test_at_its_end_it_frees_all(uri):
    attempt = begun(uri, 10)
    names = names_of(attempt)
    assert all(map(is_there, names))
    attempt.state.forget()
    assert not any(map(is_there, names))
    assert ServerState(uri, len(SERVERS)).found == {}


def test_how_long_ago_it_was_saved_goes_on(uri, monkeypatch):
    attempt = begun(uri, 10)
    now = server_state.time.time()
    monkeypatch.setattr(server_state.time, "time", lambda: now)
    attempt.state.note(7, 10)
    assert attempt.state.seconds_since_save() == 0.0
    monkeypatch.setattr(server_state.time, "time", lambda: now + 30)
    attempt = Attempt(uri)
    attempt.begin()
    assert attempt.state.found[0].saved == 7
    assert attempt.state.seconds_since_save() == pytest.approx(30, abs=1)


class Killed(BaseException):
    """Raised to simulate a kill of the chief."""


def killed_in(monkeypatch, method, work):
    """Call `work`, and kill the chief when it has called `method` of `ServerState`."""
    done = getattr(ServerState, method)

    def dies(*given):
        done(*given)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(ServerState, method, dies)
        with pytest.raises(Killed):
            work()


def test_what_has_names_in_part_is_freed_by_the_next(uri, monkeypatch):
    attempt = Attempt(uri)
    killed_in(monkeypatch, "_rename_all", attempt.begin)
    names = names_of(attempt)
    assert all(map(is_there, names))
    assert Attempt(uri).begin() == []
    assert not any(map(is_there, names))


def test_what_is_freed_in_part_is_freed_by_the_next(uri, monkeypatch):
    attempt = begun(uri, 10)
    attempt.state.found = attempt.state._find()
    killed_in(monkeypatch, "_trace_free", lambda: attempt.state._free(attempt.state.found))
    last = Attempt(uri)
    assert last.begin() == []
    assert not any(map(is_there, names_of(attempt)))
    last.state.forget()
    assert ServerState(uri, len(SERVERS)).found == {}


def test_a_value_is_not_kept_twice(uri):
    attempt = Attempt(uri)
    before = weakref.ref(attempt.held["table"].handle)
    attempt.begin()
    assert before() is None
