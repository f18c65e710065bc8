"""Tests which gradients a synchronous update uses, and how they are staged on the servers."""

from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from flotilla.trainer.strategies import sync_parameter_server
from flotilla.trainer.strategies.gradients import (
    ONE,
    add_gradients,
    build_pulled_gradient,
    divide_gradient,
)
from flotilla.trainer.strategies.strategy import build_gradient
from flotilla.trainer.strategies.sync_parameter_server import (
    TURN,
    NamedQueue,
    Staging,
    SyncParameterServer,
)
from tests.trainer.strategies.traced import ancestors

STEP = 7


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    monkeypatch.setattr(sync_parameter_server, "HUB", "/CPU:0")


class Chief(SyncParameterServer):
    """A chief without a cluster, which collects the first gradients of a step."""

    def __init__(self, name: str, *, workers: int, needed: int):
        self._workers, self._needed = workers, needed
        self._variable = tf.Variable(0.0)
        self._announced = NamedQueue([tf.int64, tf.float32], [[4], []], name=name)
        self._staging = Staging([self._variable], name=name)
        self._put = tf.function(self._put_one)
        self._taken = tf.function(self._first)

    def hears(self, *announcements: tuple[int, int]) -> None:
        """Stage the gradients 1, 2, 4, ..., and announce each with its step and loop."""
        for number, (step, loop) in enumerate(announcements):
            value = tf.constant(2.0**number)
            # All tasks of a process have the same worker number.
            numbers = (tf.constant(each, tf.int64) for each in (step, number, [0, loop]))
            self._put(*numbers, value, [value])

    def _put_one(self, *announced: Any) -> None:
        self._announce(*announced)

    def updates(self) -> tuple[float, int]:
        """Return the sum of the gradients of a step, and the number of dropped ones."""
        _, (mean,), taken, refused, _ = self._taken(tf.constant(STEP, tf.int64))
        assert sum(taken.numpy()) == self._needed
        return float(mean) * self._needed, int(sum(refused.numpy()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("announcements", "total", "refused"),
    [
        ([(STEP, 1), (STEP, 0)], 3, 0),
        ([(STEP - 1, 0), (STEP, 1), (STEP, 0)], 6, 1),
        ([(STEP, 1), (STEP, 1), (STEP, 0)], 5, 1),
        ([(STEP, 0), (STEP, 0), (STEP - 1, 1), (STEP, 0), (STEP, 1)], 17, 3),
    ],
    ids=["each once", "one is stale", "one twice, as it died in between", "all of that"],
)
def test_an_update_takes_one_gradient_of_each_worker(request, announcements, total, refused):
    chief = Chief(request.node.name, workers=2, needed=2)
    chief.hears(*announcements)
    assert chief.updates() == (total, refused)


def test_a_backup_worker_is_not_replaced_by_another_one_that_gives_twice(request):
    chief = Chief(request.node.name, workers=3, needed=2)
    chief.hears((STEP, 2), (STEP, 2), (STEP, 0))
    assert chief.updates() == (5.0, 1)


class Worker(SyncParameterServer):
    """A worker whose loop can be traced; its only gradient is the loss of the batch."""

    towers, stream = ONE, None

    def __init__(self, name: str):
        self._workers = self._needed = 1
        self.applied = self._numbers = self._open = tf.Variable(0, dtype=tf.int64)
        self._announced = NamedQueue([tf.int64, tf.float32], [[4], []], name=name)
        self._tokens = [NamedQueue([tf.int64], [[]], name=f"{name} tokens")]
        self._staging = Staging([tf.Variable(0.0)], name=name)
        self.connected = SimpleNamespace(run=lambda compute: compute())
        self._turn = lambda: TURN
        self.pulls_whole = lambda: True

    def gradient(self, *_, **__):
        def gradient(batch, *_):
            loss = tf.identity(batch, name="loss")
            return loss, [loss, loss]

        return gradient


def test_a_batch_of_a_turn_is_not_taken_before_the_loss_of_the_one_before(request):
    worker = Worker(request.node.name)
    iterator = iter(tf.data.Dataset.from_tensors(1.0).repeat())
    end = tf.constant(100, tf.int64)
    traced = worker._loop_of_worker(None).get_concrete_function(
        iterator, worker._tokens[0].handle, tf.constant(0, tf.int64), end
    )
    bodies = [
        traced.graph._get_function(each.get_attr("body").name).graph
        for each in traced.graph.get_operations()
        if each.type == "While"
    ]
    taken = [
        [each for each in body.get_operations() if each.type == "IteratorGetNext"]
        for body in bodies
    ]
    # One loop takes whole turns, and the other loop takes single steps.
    assert sorted(map(len, taken)) == [1, TURN]
    for operations in taken:
        losses = [
            sum("/loss" in each.name for each in ancestors(operation)) for operation in operations
        ]
        assert losses == list(range(len(operations)))


class Announcing(SyncParameterServer):
    """A worker without a cluster that announces the gradient of a real model."""

    scale = None

    def __init__(self, name: str, layer: keras.layers.Layer):
        self.model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        self._announced = NamedQueue([tf.int64, tf.float32], [[4], []], name=name)
        self._staging = self._create_staging(name)

    def announces(self, gradient: Any) -> tf.Graph:
        @tf.function
        def step(batch):
            loss, found = gradient(batch)
            one = tf.constant(1, tf.int64)
            self._announce(one, one, tf.stack([one, one]), loss, found)

        return step.get_concrete_function((tf.ones([4, 3]), tf.ones([4, 1]))).graph


def loss_of(_model, batch, outputs):
    return tf.reduce_mean(tf.square(outputs - batch[1]))


@pytest.mark.parametrize("pulled", [True, False], ids=["pulled", "in its place"])
def test_an_announcement_comes_after_the_moving_averages(request, pulled):
    worker = Announcing(request.node.name, keras.layers.BatchNormalization())
    gradient = (
        build_pulled_gradient(worker.model, loss_of, jit=False)
        if pulled
        else build_gradient(worker.model, loss_of)
    )
    operations = worker.announces(gradient).get_operations()
    moved = {each for each in operations if each.type.startswith("Assign")}
    assert len(moved) == 2
    (announced,) = (each for each in operations if each.type == "QueueEnqueueV2")
    assert moved <= ancestors(announced)


def test_state_on_a_server_without_gradients_is_waited_for_too(request):
    class Elsewhere:
        """A variable that claims to be on another server."""

        device = "/device:CPU:0"

        def __init__(self):
            self.kept = tf.Variable(0.0)
            self.read_value = self.kept.read_value

    state = Elsewhere()
    staging = Staging([tf.Variable(0.0)], name=request.node.name, state=[state])

    @tf.function
    def step():
        state.kept.assign_add(1.0)
        with tf.control_dependencies(staging.put(tf.constant(1, tf.int64), [tf.constant(1.0)])):
            tf.no_op("announced")

    graph = step.get_concrete_function().graph
    (moved,) = (each for each in graph.get_operations() if each.type == "AssignAddVariableOp")
    assert moved in ancestors(graph.get_operation_by_name("announced"))


ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.fixture
def variables() -> list[tf.Variable]:
    return [tf.Variable([0.0, 0.0]), tf.Variable(ROWS), tf.Variable(7.0)]


def gradient(scale: float, rows: list[int]) -> list[Any]:
    values = scale * tf.ones([len(rows), 2])
    slices = tf.IndexedSlices(values, tf.constant(rows), tf.constant([3, 2]))
    return [scale * tf.constant([1.0, 2.0]), slices, tf.constant(scale)]


def staged(staging: Staging, number: int, parts: list[Any]) -> None:
    tf.function(lambda: staging.put(tf.constant(number, tf.int64), parts) and None)()


def taken(staging: Staging, number: int) -> list[Any]:
    return tf.function(lambda: staging.take(tf.constant(number, tf.int64)))()


def test_a_gradient_is_taken_by_its_number_as_it_was_put(variables):
    staging = Staging(variables, name="by number")
    staged(staging, 1, gradient(1.0, [0, 2]))
    staged(staging, 2, gradient(3.0, [1]))
    dense, rows, scalar = taken(staging, 2)
    assert dense.numpy().tolist() == [3.0, 6.0]
    assert rows.indices.numpy().tolist() == [1]
    assert rows.values.numpy().tolist() == [[3.0, 3.0]]
    assert rows.dense_shape.numpy().tolist() == [3, 2]
    assert scalar.numpy() == 3.0
    dense, rows, _ = taken(staging, 1)
    assert dense.numpy().tolist() == [1.0, 2.0]
    assert rows.indices.numpy().tolist() == [0, 2]


def test_places_do_not_share_their_gradients(variables):
    one, other = Staging(variables, name="one"), Staging(variables, name="other")
    staged(one, 1, gradient(1.0, [0]))
    staged(other, 1, gradient(2.0, [0]))
    assert taken(one, 1)[0].numpy().tolist() == [1.0, 2.0]
    assert taken(other, 1)[0].numpy().tolist() == [2.0, 4.0]


def test_the_mean_keeps_rows_as_rows():
    sums = map(add_gradients, gradient(1.0, [0, 2]), gradient(3.0, [2]))
    dense, rows, scalar = (divide_gradient(each, 2) for each in sums)
    assert dense.numpy().tolist() == [2.0, 4.0]
    assert tf.convert_to_tensor(rows).numpy().tolist() == [[0.5, 0.5], [0.0, 0.0], [2.0, 2.0]]
    assert rows.indices.shape == [3]
    assert scalar.numpy() == 2.0
