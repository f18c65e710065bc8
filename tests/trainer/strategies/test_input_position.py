"""Tests the order of the examples, and the count of the examples that workers visited."""

import json
import random

import pytest
import tensorflow as tf

from flotilla.trainer.strategies.input_position import (
    STALENESS_WINDOW,
    Position,
    Stream,
    Tally,
    encode_plan,
)
from flotilla.trainer.strategies.parameter_server import NUMBER_FILE, worker_number


def stream(examples: int, **named: object) -> Stream:
    def held() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensors(tf.range(examples, dtype=tf.int64))

    def read(numbers: tf.Tensor, wanted: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        found = tf.gather(numbers, wanted)
        return found, found % 2

    return Stream(examples=examples, held=held, read=read, **{"seed": 3, **named})


def taken(lent: Stream, position: Position, first: int, size: int) -> list[int]:
    (held,) = lent.held()
    batch, _ = lent.batch(held, encode_plan(position), tf.constant(first, tf.int64), size)
    return batch.numpy().tolist()


@pytest.mark.parametrize(
    ("examples", "run"),
    [
        (100, 8),
        *(
            pytest.param(examples, run, marks=pytest.mark.slow)
            for examples in (1, 7, 8, 100, 1437)
            for run in (1, 8)
            if (examples, run) != (100, 8)
        ),
    ],
)
def test_an_epoch_has_each_example_once_in_an_order_of_its_own(examples, run):
    lent = stream(examples, run=run)
    epochs = [taken(lent, Position(visited=n * examples), 0, examples) for n in range(3)]
    # Another seed is another order.
    for seed in (0, 2**31 - 1):
        epochs.append(taken(stream(examples, run=run, seed=seed), Position(), 0, examples))
    assert all(sorted(epoch) == list(range(examples)) for epoch in epochs)
    if examples // run > 10:
        assert len({tuple(epoch) for epoch in epochs}) == 5


def test_a_batch_reaches_into_the_next_epoch():
    lent = stream(10)
    batches = [taken(lent, Position(), first, 4) for first in range(0, 20, 4)]
    seen = [number for batch in batches for number in batch]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))


def test_what_comes_next_begins_with_the_gaps():
    position = Position(visited=20, gaps=((3, 2), (8, 1)))
    assert position.plan() == [(0, 3), (2, 8), (3, 20)]
    assert position.examples == 17
    assert position.advance([(0, 3)]) == Position(visited=20)
    assert position.advance([(0, 5)]) == Position(visited=22)
    assert position.advance([(1, 2), (4, 2)]) == Position(visited=23, gaps=((3, 1), (20, 1)))
    assert position.advance([]) == position
    assert Position(visited=4).advance([(0, 2), (4, 2)]) == Position(visited=10, gaps=((6, 2),))


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_taken_each_position_is_visited_once(seed):
    draw = random.Random(seed)
    position, seen = Position(), list[int]()
    for _ in range(30):
        size = draw.randint(1, 5)
        wanted = sorted(draw.sample(range(20), draw.randint(0, 12)))
        plan = position.plan()
        for number in wanted:
            for place in range(number * size, (number + 1) * size):
                begin, first = [pair for pair in plan if pair[0] <= place][-1]
                seen.append(first + place - begin)
        position = position.advance((number * size, size) for number in wanted)
    missing = {place for first, count in position.gaps for place in range(first, first + count)}
    assert len(seen) == len(set(seen)) == position.examples
    assert set(seen) == set(range(position.visited)) - missing


def test_a_resumed_stream_goes_on_where_the_checkpoint_was(caplog):
    lent = stream(10)
    position = Position(visited=14, gaps=((2, 3),))
    saved = lent.to_json(position)
    assert lent.resume(saved, "file:///c").position == position
    assert lent.epoch(position) == 1.1
    assert not caplog.records


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        (None, "partition"),
        ({"examples": 30}, "partition"),
        ({"partition": "dynamic", "of": 11, "seed": 3, "run": 1}, "of"),
        ({"partition": "dynamic", "of": 10, "seed": 4, "run": 1}, "seed"),
    ],
)
def test_the_position_in_another_order_is_not_used(saved, what, caplog):
    assert stream(10).resume(saved, "file:///c").position == Position()
    (line,) = caplog.messages
    assert line.startswith("file:///c has no input position for this order of the examples")
    assert f"({what} differs)" in line


def test_several_tasks_take_turns_without_end():
    parts = [
        list(stream(12).endless(2, index, 3).take(4).as_numpy_iterator()) for index in range(3)
    ]
    seen = [int(number) for part in parts for inputs, _ in part for number in inputs]
    assert sorted(seen) == sorted([*range(12), *range(12)])


def test_lent_batches_are_those_of_the_range():
    lent = stream(30)
    (held,) = lent.held()
    plan, first = encode_plan(Position(visited=6)), tf.constant(10, tf.int64)
    batches = lent.lend(held, plan, first, batches=tf.constant(3), size=5)
    seen = [number for inputs, _ in batches.as_numpy_iterator() for number in inputs.tolist()]
    assert seen == taken(lent, Position(visited=16), 0, 15)


def test_steps_and_examples_add_up_by_worker():
    tally = Tally(batch_size=8)
    assert tally.metrics() == {"workers": {}}
    for worker, steps in [("worker-1", 3), ("worker-0", 5), ("worker-1", 4)]:
        tally.add(worker, steps)
    metrics = tally.metrics()
    assert metrics == {
        "workers": {
            "worker-0": {"local_steps": 5, "examples": 40},
            "worker-1": {"local_steps": 7, "examples": 56},
        }
    }
    assert list(metrics["workers"]) == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("values", "mean", "percentile"),
    [
        (range(101), 50, 95),
        ([0], 0, 0),
        # Only the last updates tell the staleness, but all of them count.
        ([1e6] * 50 + [2] * STALENESS_WINDOW, 2, 2),
    ],
    ids=["many", "none", "more than the window"],
)
def test_staleness_is_reported_as_its_mean_and_its_95th_percentile(values, mean, percentile):
    tally = Tally(batch_size=8)
    for value in values:
        tally.add("worker-0", 1, staleness=float(value))
    metrics = tally.metrics()
    found = metrics["staleness_mean"], metrics["staleness_p95"]
    assert found == pytest.approx((mean, percentile))
    assert metrics["workers"]["worker-0"]["local_steps"] == len(values)
    assert json.loads(json.dumps(metrics)) == metrics


def test_a_worker_knows_its_number_from_its_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NUMBER_FILE).write_text("3", encoding="utf-8")
    assert worker_number().numpy() == 3
