"""Tests the turns of workers, and the wait for workers that still serve an earlier chief."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.strategies import async_parameter_server as module
from flotilla.trainer.strategies.async_parameter_server import (
    LOSS,
    OTHERS,
    UPDATES,
    Turns,
    run_exclusively,
    run_on_workers,
)

WORKERS = 3


@pytest.fixture
def applied():
    return tf.Variable(0, dtype=tf.int64)


@pytest.fixture
def turns(applied):
    return Turns(WORKERS, applied)


@pytest.fixture
def begin(turns):
    begun = tf.function(turns.begin)
    return lambda closure: begun(tf.constant(closure, tf.int64))


@pytest.fixture
def take(turns, begin):
    """Return a function that takes a turn for a run; by default, a new run of the first closure."""
    taken = tf.function(turns.take)
    return lambda own=None: taken(begin(0) if own is None else own)


def test_as_many_are_taken_as_were_dealt(turns, take):
    turns.deal(3)
    assert [bool(take()) for _ in range(5)] == [True] * 3 + [False] * 2
    seen = turns.look()
    assert (seen.taken, seen.refused) == (3, 2)


def test_what_was_refused_is_there_once_more_are_dealt(turns, take):
    turns.deal(1)
    assert [bool(take()) for _ in range(4)] == [True, False, False, False]
    turns.extend(3)
    assert [bool(take()) for _ in range(4)] == [True, True, False, False]
    assert turns.look().taken == 3


def test_none_is_left_where_workers_are_to_end(turns, take):
    turns.deal(9)
    assert bool(take())
    turns.extend(0)
    assert not bool(take())
    assert turns.look().taken == 1
    turns.deal(1)
    seen = turns.look()
    assert (seen.taken, seen.refused) == (0, 0)
    assert bool(take())


def taken_at_once(turns, dealt, closures):
    """Deal turns, let a thread take turns for each closure, and return how many were taken."""

    @tf.function
    def all_of_a_worker(closure):
        count, own = tf.constant(0), turns.begin(closure)
        while turns.take(own):
            count += 1
        return count

    turns.deal(dealt)
    wanted = [tf.constant(each, tf.int64) for each in closures]
    all_of_a_worker.get_concrete_function(wanted[0])
    with ThreadPoolExecutor(len(wanted)) as pool:
        counts = list(pool.map(lambda each: int(all_of_a_worker(each)), wanted))
    assert sum(counts) == turns.look().taken
    return sum(counts)


def test_workers_that_take_at_once_take_exactly_what_is_there(turns):
    dealt, threads = 2000, 8

    assert taken_at_once(turns, dealt, range(threads)) == dealt
    assert turns.look().refused == threads


def test_a_closure_that_runs_again_ends_the_run_before_at_its_next_turn(turns, begin, take):
    turns.deal(9)
    one, other = begin(3), begin(4)
    assert all(map(take, (one, other)))
    again = begin(3)
    assert [bool(take(each)) for each in (one, again, other, one)] == [False, True, True, False]
    seen = turns.look()
    # The chief still waits for the closure, which has not ended.
    assert (seen.taken, seen.refused) == (4, 0)


def test_only_the_newest_run_of_a_closure_holds_what_was_handed_out_with_it(turns, begin):
    holds = tf.function(turns.holds)
    one, other = begin(3), begin(4)
    assert [bool(holds(each)) for each in (one, other)] == [True, True]
    again = begin(3)
    assert [bool(holds(each)) for each in (one, again, other)] == [False, True, True]
    turns.deal(0)
    assert not any(bool(holds(each)) for each in (again, other))
    assert (turns.look().taken, turns.look().refused) == (0, 0)


def test_a_run_of_an_older_stretch_takes_no_turn(turns, begin, take):
    turns.deal(9)
    late = begin(0)
    assert take(late)
    turns.extend(0)
    turns.deal(1)
    assert not take(late)
    assert (turns.look().taken, turns.look().refused) == (0, 0)
    assert take(begin(1))


def test_two_runs_of_a_closure_at_once_make_exactly_what_is_dealt(turns):
    assert taken_at_once(turns, 300, [0] * 4) == 300
    assert turns.look().refused >= 1


def test_each_worker_has_its_sums(turns, applied):
    @tf.function
    def report(worker, loss, others):
        began = turns.read_applied()
        applied.assign_add(20 + others)
        turns.report(worker, loss, 20, began)

    for worker, loss, others in ((2, 1.5, 7), (0, 3.0, 0), (2, 0.25, 3)):
        numbers = (tf.constant(n, tf.int64) for n in (worker, others))
        report(next(numbers), tf.constant(loss), next(numbers))
    seen = turns.look()
    assert seen.applied == 70
    assert seen.reports[:, LOSS].tolist() == [3.0, 0.0, 1.75]
    assert seen.reports[:, UPDATES].tolist() == [20.0, 0.0, 40.0]
    assert seen.reports[:, OTHERS].tolist() == [0.0, 0.0, 10.0]
    turns.deal(5)
    np.testing.assert_array_equal(turns.look().reports, seen.reports)


def alone_with(work):
    """Return a graph in which a worker runs a Python function for a chief."""
    return tf.function(
        partial(run_exclusively, lambda: [tf.py_function(work, [], tf.int32)]), autograph=False
    )


def test_a_worker_works_for_one_chief_at_a_time():
    begun, end, order = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert end.wait(60)
        order.append("first")
        return 0

    def second():
        order.append("second")
        return 0

    with ThreadPoolExecutor() as threads:
        one = threads.submit(alone_with(first))
        assert begun.wait(60)
        other = threads.submit(alone_with(second))
        with pytest.raises(TimeoutError):
            other.result(timeout=1)
        end.set()
        one.result(60)
        other.result(60)
    assert order == ["first", "second"]


def test_what_fails_lets_the_next_one_begin():
    def fails():
        raise ValueError("no")

    with pytest.raises(tf.errors.InvalidArgumentError):
        alone_with(fails)()
    done = []
    alone_with(lambda: done.append(1) or 0)()
    assert done == [1]


@pytest.fixture
def waited(monkeypatch):
    """Return a function that waits until two workers have run a Python function."""
    monkeypatch.setattr(module, "worker_device", lambda _: "/device:CPU:0")

    def wait(work, seconds):
        def graph():
            tf.py_function(work, [], [])

        run_on_workers(2, graph, seconds)

    return wait


@pytest.mark.parametrize("fails", [False, True])
def test_workers_are_waited_for_and_one_that_is_gone_has_done_its_own(waited, fails):
    def gone():
        done.append(1)
        if fails:
            raise tf.errors.UnavailableError(None, None, "it is gone")

    done = []
    waited(gone, 60.0)
    assert done == [1, 1]


def test_one_that_does_not_end_ends_the_attempt(waited):
    ends = threading.Event()
    with pytest.raises(
        ClusterLostError, match=r"worker-0 has not finished its work .* after 0.2 s"
    ):
        waited(lambda: ends.wait(60) and None, 0.2)
    ends.set()
