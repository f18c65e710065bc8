"""The next chief calls the graph that one has left, or traces its own.

All servers are this process. That graphs survive a process is in
`tests/cluster/test_left_variables.py`.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer
from tests.trainer.strategies.test_left_variables import (
    SERVERS,
    Attempt,
    _here,  # noqa: F401
    join_again,
)
from trainer import user_code
from trainer.strategies import left_variables
from trainer.strategies.left_graphs import LeftGraphs
from trainer.strategies.remade import Remade

NUMBER = 20
NOT_USED = "the graph that a chief has left is not used"
SOME = {"added": tf.constant(1.0), "more": tf.constant(1.0)}


@pytest.fixture(autouse=True)
def _loaded(monkeypatch):
    """Of the user's modules there is none: in a process of tests there are hundreds."""
    monkeypatch.setattr(user_code, "loaded_digest", lambda: "none")


class Chief(Attempt):
    """An attempt of a chief whose turns add to a table, and look up rows of one that grows.

    `besides` is what else is done in a turn.
    """

    def __init__(self, uri, *, besides=lambda: 0.0, devices=("/device:CPU:0",), **sections):
        super().__init__(uri, **sections)
        self.traces, self.besides, self.devices = 0, besides, devices

    def take_left(self, others):
        self.graphs = LeftGraphs(self.config, self.left, self.devices)
        self.get_ready()
        return super().take_left(others)

    def get_ready(self):
        """Take a step before it is known what is there."""
        if found := self.graphs.beforehand():
            assert (found[0], float(found[1](SOME))) == (NUMBER, 0.0)
            self.graphs.wait(lambda: True)

    def begin(self, saved=5):
        found = super().begin(saved)
        own = tf.function(self._step, autograph=False)
        self.step = self.graphs.handed_out(self.handles).get(NUMBER, own)
        return found

    def _step(self, some):
        self.traces += 1
        own = self.turns.begin(tf.constant(0, tf.int64))

        def turn(_, total):
            self.held["table"].assign_add(tf.fill(self.held["table"].shape, some["added"]))
            self.grown(tf.constant([1, 10]), training=True)
            total += tf.reduce_sum(self.held["table"].read_value()) + self.besides()
            return self.turns.take(own), total + some["more"]

        none = self.turns.take(own), tf.constant(0.0)
        return tf.while_loop(lambda found, _: found, turn, none)[1]

    def turn(self):
        """Take a turn, as all workers do, and return its result."""
        self.turns.deal(1)
        return float(self.step(SOME))

    def leave(self):
        self.graphs.leave(NUMBER, self.step, self.handles)

    def run(self):
        """Take a turn, and leave its graph; return the result."""
        total = self.turn()
        self.leave()
        return total


@pytest.fixture
def chief(request):
    """Return what begins a chief of a run of its own, one after the other."""
    made = []

    def begun(**given):
        made.append(Chief(f"file:///{request.node.name}", **given))
        made[-1].begin()
        return made[-1]

    yield begun
    made[-1].left.forget()


def trained(chief, **given):
    """Return a first chief that has trained to step 10 and taken a step."""
    first = chief(**given)
    first.train(10)
    assert (first.run(), first.traces) == (133.0, 1)
    return first


def test_the_next_chief_traces_nothing_and_steps_as_the_first_one_did(chief):
    trained(chief)
    second = chief()
    assert (second.run(), second.traces) == (145.0, 0)
    assert second.values()["table"] == [12.0]
    # The ids of the step have the rows that they had.
    assert second.grown.metrics()["rows"] == 2
    third = chief()
    assert (third.run(), third.traces) == (157.0, 0)


def test_one_whose_chief_dies_before_a_step_is_not_called_again(chief):
    trained(chief)
    chief()
    third = chief()
    assert (third.run(), third.traces) == (145.0, 1)


@pytest.mark.parametrize("given", [{"name": "other"}, {"devices": ("/device:CPU:0",) * 2}])
def test_with_another_configuration_it_is_traced(chief, given):
    trained(chief)
    second = chief(**given)
    assert (second.run(), second.traces) == (145.0, 1)


@pytest.mark.parametrize(
    "what",
    [
        "code",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("tensorflow", "keras", "files", "environment")
        ),
    ],
)
def test_with_other_code_it_is_traced(chief, monkeypatch, tmp_path, what):
    trained(chief)
    (tmp_path / "__init__.py").touch()
    {
        "code": lambda: monkeypatch.setattr(user_code, "loaded_digest", lambda: "another"),
        "tensorflow": lambda: monkeypatch.setattr(tf, "__version__", "2"),
        "keras": lambda: monkeypatch.setattr(keras, "__version__", "4"),
        "files": lambda: monkeypatch.setattr(trainer, "__file__", str(tmp_path / "__init__.py")),
        "environment": lambda: monkeypatch.setenv("ALPHA", "5"),
    }[what]()
    second = chief()
    assert (second.run(), second.traces) == (145.0, 1)


def test_where_a_step_loads_more_code_its_graph_is_not_left(chief, monkeypatch):
    first = chief()
    first.train(10)
    first.turn()
    monkeypatch.setattr(user_code, "loaded_digest", lambda: "another")
    first.leave()
    assert first.left.graph == b""


def test_a_lost_server_is_no_reason_to_go_on(chief):
    first = chief()
    first.train(10)
    first.turn()
    left_variables._destroy(first.left.permit)
    with pytest.raises(tf.errors.OpError):
        first.leave()


def test_an_error_in_it_says_what_it_says_where_it_was_traced(chief):
    def checked():
        tf.debugging.assert_greater(13.0, table.read_value()[0, 0], "it is too large")
        return 0.0

    table = None

    def besides():
        nonlocal table
        table = made[-1].held["table"]
        return checked()

    made = []

    def begun():
        made.append(chief(besides=besides))
        return made[-1]

    first = begun()
    first.train(10)
    assert (first.run(), first.traces) == (133.0, 1)
    second = begun()
    second.run()
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        second.run()
    assert second.traces == 0
    assert "stack traces unavailable" in str(raised.value)
    assert "it is too large" in user_code.message_of(raised.value)


def test_a_graph_of_another_number_is_not_taken_for_it(chief):
    trained(chief)
    second = chief()
    assert list(second.graphs.handed_out(second.handles)) == [NUMBER]


@pytest.mark.parametrize(
    "besides",
    [
        lambda variable: variable.read_value(),
        lambda _: tf.py_function(lambda: 1.0, [], tf.float32),
        lambda _: tf.numpy_function(lambda: np.float32(1.0), [], tf.float32),
    ],
    ids=["a variable that the next chief does not know", "py_function", "numpy_function"],
)
def test_what_another_chief_could_not_call_is_not_left(chief, besides):
    variable = tf.Variable(1.0)
    first = chief(besides=lambda: tf.reshape(besides(variable), []))
    first.train(10)
    assert first.run() == 134.0
    assert first.left.graph == b""


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"no graph",
        lambda graph: graph[:-40],
        lambda graph: graph.replace(b'"name": "turns/end"', b'"name": "turns/gone"'),
    ],
)
def test_one_that_cannot_be_read_is_traced_with_a_warning(chief, caplog, damage):
    first = trained(chief)
    first.left.leave_graph(damage(first.left.graph))
    second = chief()
    assert (second.run(), second.traces) == (145.0, 1)
    assert NOT_USED in caplog.text


def test_one_that_workers_fail_to_get_ready_is_traced_with_a_warning(chief, caplog, monkeypatch):
    def wait(chief):
        def fail():
            raise tf.errors.InvalidArgumentError(None, None, "no kernel")

        chief.graphs.wait(fail)

    trained(chief)
    monkeypatch.setattr(Chief, "get_ready", wait)
    second = chief()
    assert (second.run(), second.traces) == (145.0, 1)
    assert f"{NOT_USED}: InvalidArgumentError: no kernel" in caplog.text


def test_where_the_model_loads_other_code_it_is_not_called_again(chief, monkeypatch):
    trained(chief)
    get_ready = Chief.get_ready

    def load(chief):
        get_ready(chief)
        monkeypatch.setattr(user_code, "loaded_digest", lambda: "another")

    monkeypatch.setattr(Chief, "get_ready", load)
    second = chief()
    # What stands in there is not made again with a server.
    assert second.graphs._found is None
    assert (second.run(), second.traces) == (145.0, 1)


@pytest.mark.parametrize("in_time", [True, False])
def test_stand_ins_are_freed_once_nobody_uses_them(chief, monkeypatch, in_time):
    def get_ready(chief):
        if found := chief.graphs.beforehand():
            handles.extend(chief.graphs._found._handles)
            found[1](SOME)
            before.append(values())
            chief.graphs.wait(lambda: in_time)

    def values():
        return sum(bool(tf.raw_ops.VarIsInitializedOp(resource=each)) for each in variables())

    def variables():
        return [each for each in handles if getattr(each, "_handle_data", None)]

    handles, before = [], []
    trained(chief)
    monkeypatch.setattr(Chief, "get_ready", get_ready)
    second = chief()
    # Those of turns alone have values.
    assert 0 < before[0] < len(variables())
    assert values() == (0 if in_time else before[0])
    assert (second.run(), second.traces) == (145.0, 0)


def test_what_fails_when_it_is_left_is_a_warning(chief, caplog, monkeypatch):
    def fail():
        raise AttributeError("a private name")

    first = chief()
    first.train(10)
    first.turn()
    monkeypatch.setattr(first.step, "_list_all_concrete_functions", fail)
    first.leave()
    assert "the next chief traces anew: " in caplog.text


def test_one_that_no_worker_has_run_does_not_come_back_with_a_server(chief, monkeypatch):
    trained(chief)
    second = chief()
    left_variables._destroy(second.left._graph)
    remade = Remade(SERVERS, second.left.names)
    monkeypatch.setattr(remade, "was_on", lambda _: True)
    second.left.remake(remade)
    assert second.left._graph.numpy() == b""


def test_it_comes_back_with_a_server_that_was_started_again(chief, monkeypatch):
    first = trained(chief)
    join_again(first, monkeypatch, first.left._graph)
    first.train(20)
    second = chief()
    assert (second.run(), second.traces) == (265.0 - 12.0, 0)


def test_what_is_freed_has_no_graph(chief):
    first = trained(chief)
    left = first.left
    assert bool(tf.raw_ops.VarIsInitializedOp(resource=left._graph.handle))
    left.forget()
    assert not bool(tf.raw_ops.VarIsInitializedOp(resource=left._graph.handle))


def test_without_what_outlives_a_chief_nothing_is_left():
    graphs = LeftGraphs(Attempt("file:///none").config, None, [])
    assert graphs.beforehand() is None
    assert graphs.handed_out(dict) == {}
    graphs.leave(NUMBER, None, dict)
