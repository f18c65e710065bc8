"""Steps with examples are handed out in few portions that end together."""

from __future__ import annotations

import heapq

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.strategies.fleet import Fleet, Led
from trainer.strategies.parameter_server import NUMBER_FILE
from trainer.strategies.turns import MAX_PORTION, Turns, portions, unit_of

steps, workers, turns = st.integers(1, 5000), st.integers(1, 200), st.sampled_from([1, 20])


def cut_up(steps, workers, turn):
    return portions(steps, workers, unit_of(steps, workers, turn))


@given(steps, workers, turns)
def test_all_steps_are_handed_out_once(steps, workers, turn):
    cut = cut_up(steps, workers, turn)
    assert sum(cut) == steps
    assert all(0 < size <= MAX_PORTION for size in cut)


@given(steps, workers, turns)
def test_larger_ones_come_first(steps, workers, turn):
    cut = cut_up(steps, workers, turn)
    assert cut == sorted(cut, reverse=True)


@given(steps, workers)
def test_every_worker_gets_one(steps, workers):
    assert len(cut_up(steps, workers, 1)) >= min(steps, workers)


@pytest.mark.parametrize(
    ("steps", "workers", "turn", "expected"),
    [
        (1, 2, 20, [1]),
        (20, 2, 20, [2, 2, 2, *[1] * 14]),
        # A step takes long where a hundred workers do five each in a stretch.
        (500, 100, 20, [1] * 500),
    ],
)
def test_portions(steps, workers, turn, expected):
    assert cut_up(steps, workers, turn) == expected


def spent(cut, costs):
    """Return when the last of some workers ends, each taking a portion as soon as it is free."""
    free = [(0.0, cost) for cost in costs]
    for size in cut:
        begin, cost = heapq.heappop(free)
        heapq.heappush(free, (begin + size * cost, cost))
    return max(end for end, _ in free)


@pytest.mark.parametrize("turn", [1, 20])
@pytest.mark.parametrize("others", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("each", [40, 100, 300, 1000, 3000])
def test_a_worker_that_is_four_times_slower_takes_a_quarter(turn, others, each):
    costs = [*[1.0] * others, 4.0]
    steps, of = each * others, len(costs)
    cut = cut_up(steps, of, turn)
    ideal = steps / sum(1 / cost for cost in costs)
    assert spent(cut, costs) <= 1.15 * ideal


class Lent(Led):
    """The strategy with turns on this machine, and examples without end."""

    def __init__(self):
        super().__init__(Fleet(2))
        self.applied = tf.Variable(0, dtype=tf.int64)
        self._turns = Turns(2, self.applied)

    def lent(self, iterator, batches, *lease):
        del batches, lease
        return iterator


@pytest.mark.parametrize(("taken_at", "made"), [(0, 20), (1, 4), (3, 6), (17, 20)])
def test_a_portion_ends_soon_after_it_was_handed_out_again(tmp_path, monkeypatch, taken_at, made):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NUMBER_FILE).write_text("1", encoding="utf-8")
    strategy, closure = Lent(), tf.constant(5, tf.int64)
    applied, turns = strategy.applied, strategy._turns

    def update(iterator):
        next(iterator)
        applied.assign_add(1)
        # Another worker begins with it.
        tf.cond(applied == taken_at, lambda: turns.begin(closure), lambda: closure[None])
        return tf.constant(2.0)

    portion = strategy._portion(update, 2)
    batches = iter(tf.data.Dataset.range(100))
    total, worker, others, reported = portion(batches, tf.constant(10), closure).numpy().tolist()
    assert applied.numpy() == made
    assert (total, worker, others, reported) == (2.0 * made, 1, 0, made)


class CutShort(Led):
    """The strategy with portions of which some runs end before all of their updates are made."""

    def __init__(self, made):
        super().__init__(Fleet(2))
        self._made = iter(made)
        self.taken, self.visited_updates = [], 0

    def lease(self, batches):
        return (batches,)

    def dispatch(self, calls):
        ended = []
        for turn, (_, turns, _, first) in calls:
            size = int(turns) * turn
            made = min(size, next(self._made, size))
            self.taken += range(first, first + made)
            ended.append((2.0 * made, 1, 0, made))
        return ended

    def pass_over(self, batches):
        self.visited_updates = batches


@pytest.mark.parametrize("made", [[], [0, 1, 2], [3] * 20])
def test_what_a_portion_did_not_make_is_made_again_of_the_same_examples(made):
    strategy = CutShort(made)
    report = strategy._portions(50)
    assert sorted(strategy.taken) == list(range(50))
    assert (strategy.visited_updates, report.loss) == (50, 2.0)
    assert report.metrics["workers"]["worker-1"]["local_steps"] == 50
