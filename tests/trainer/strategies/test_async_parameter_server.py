"""Tests the portions and turns of asynchronous training, and the chief's counts."""

import heapq
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.strategies import async_parameter_server
from flotilla.trainer.strategies.async_parameter_server import (
    LONG_RUN,
    LOOK_SECONDS,
    MAX_PORTION,
    OTHERS,
    TURN,
    UPDATES,
    Turns,
    adjust_unit,
    choose_unit,
    choose_unroll,
    portions,
    run_exclusively,
    run_on_workers,
)
from flotilla.trainer.strategies.parameter_server import NUMBER_FILE
from tests.trainer.strategies.fleet import LOSS, Fleet, Led

steps, workers, turn_sizes = st.integers(1, 5000), st.integers(1, 200), st.sampled_from([1, 20])


def cut_up(steps, workers, turn):
    return portions(steps, workers, choose_unit(steps, workers, turn))


@given(steps, workers, turn_sizes)
def test_all_steps_are_handed_out_once_and_larger_portions_first(steps, workers, turn):
    cut = cut_up(steps, workers, turn)
    assert sum(cut) == steps
    assert cut == sorted(cut, reverse=True)
    assert turn > 1 or len(cut) >= min(steps, workers)
    assert all(0 < size <= MAX_PORTION for size in cut)


@pytest.mark.parametrize(
    ("steps", "workers", "turn", "expected"),
    [
        (1, 2, 20, [1]),
        (20, 2, 20, [2, 2, 2, *[1] * 14]),
        # With five updates per worker, a turn of 20 updates would leave most workers idle, so each
        # portion has one update.
        (500, 100, 20, [1] * 500),
    ],
)
def test_portions(steps, workers, turn, expected):
    assert cut_up(steps, workers, turn) == expected


def spent(cut, costs):
    """Return when the last worker finishes if each takes a portion as soon as it is free."""
    free = [(0.0, cost) for cost in costs]
    for size in cut:
        begin, cost = heapq.heappop(free)
        heapq.heappush(free, (begin + size * cost, cost))
    return max(end for end, _ in free)


@pytest.mark.parametrize("turn", [1, 20])
def test_a_worker_that_is_four_times_slower_takes_a_quarter(turn):
    for others, each in itertools.product([1, 2, 3, 7, 15], [40, 100, 300, 1000, 3000]):
        costs = [*[1.0] * others, 4.0]
        steps, of = each * others, len(costs)
        cut = cut_up(steps, of, turn)
        ideal = steps / sum(1 / cost for cost in costs)
        assert spent(cut, costs) <= 1.15 * ideal, (others, each)


class Lent(Led):
    """The strategy with real turn counters in this process, and with endless examples."""

    def __init__(self):
        super().__init__(Fleet(2))
        self.applied = tf.Variable(0, dtype=tf.int64)
        self._turns = Turns(2, self.applied)

    def lend(self, iterator, batches, *lease):
        del batches, lease
        return iterator


@pytest.mark.parametrize(("taken_at", "made"), [(0, 20), (3, 6)])
def test_a_portion_ends_soon_after_it_was_handed_out_again(tmp_path, monkeypatch, taken_at, made):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NUMBER_FILE).write_text("1", encoding="utf-8")
    strategy, closure = Lent(), tf.constant(5, tf.int64)
    applied, turns = strategy.applied, strategy._turns

    def update(iterator):
        next(iterator)
        applied.assign_add(1)
        # Simulate another worker that starts the same portion.
        tf.cond(applied == taken_at, lambda: turns.begin(closure), lambda: closure[None])
        return tf.constant(2.0)

    portion = strategy._portion(update, 2)
    batches = iter(tf.data.Dataset.range(100))
    total, worker, others, reported = portion(batches, tf.constant(10), closure).numpy().tolist()
    assert applied.numpy() == made
    assert (total, worker, others, reported) == (2.0 * made, 1, 0, made)


class CutShort(Led):
    """The strategy with portions that may end before all of their updates are applied."""

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

    def advance_position(self, batches):
        self.visited_updates = batches


@pytest.mark.parametrize("made", [[], [0, 1, 2], [3] * 20])
def test_what_a_portion_did_not_make_is_made_again_of_the_same_examples(made):
    strategy = CutShort(made)
    report = strategy._portions(50)
    assert sorted(strategy.taken) == list(range(50))
    assert (strategy.visited_updates, report.loss) == (50, 2.0)
    assert report.metrics["workers"]["worker-1"]["local_steps"] == 50


FAST = 100 * TURN


class Clock:
    """A clock that advances with each sleep, in which the fleet makes a round."""

    def __init__(self):
        self.now, self.fleet = 0.0, None

    def monotonic(self):
        return self.now

    def sleep(self, _seconds):
        self.now += LOOK_SECONDS / 10
        self.fleet.round()


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(async_parameter_server, "time", found)
    return found


def led(clock, fleet, **named):
    clock.fleet = fleet
    return Led(fleet, **named)


@pytest.mark.parametrize(
    ("steps", "whole", "turn"),
    [(LONG_RUN, True, TURN), (LONG_RUN - 1, True, 1), (10 * LONG_RUN, False, 1)],
)
def test_long_runs_of_what_is_pulled_whole_make_turns(steps, whole, turn):
    assert choose_unroll(steps, whole=whole) == turn


@pytest.mark.parametrize(
    ("steps", "now", "unit"),
    [(79, 1, 1), (80, 1, TURN), (80, TURN, TURN), (40, TURN, TURN), (39, TURN, 1)],
)
def test_turns_are_unrolled_for_fast_workers_until_they_are_slow(steps, now, unit):
    assert adjust_unit(steps, 2, TURN, now) == unit


@given(
    steps=st.integers(1, 3000),
    workers=st.integers(1, 40),
    turn=st.sampled_from([1, TURN]),
    deaths=st.dictionaries(st.integers(0, 60), st.integers(0, TURN), max_size=20),
)
def test_all_steps_are_applied_and_no_more_whatever_worker_dies(steps, workers, turn, deaths):
    fleet = Fleet(workers, deaths.get)
    report = Led(fleet, turn).run(steps)
    assert fleet.applied == fleet.most == steps
    assert report.global_step is None
    counted = sum(each["local_steps"] for each in report.metrics["workers"].values())
    # A dead worker does not report the part of its turn that it applied.
    assert 0 <= steps - counted <= sum(min(n, turn) for n in deaths.values())


@pytest.mark.parametrize(
    ("workers", "steps", "units"),
    [
        # However long a stretch is, there is one closure for each worker.
        (3, 90 * TURN, [TURN] * 3),
        # What is no multiple of a turn is applied one by one, as are a few steps.
        (2, 20 * TURN + 3, [TURN, TURN, 1, 1]),
        *((2, steps, [1, 1]) for steps in (TURN, 8 * TURN - 1)),
        # No more workers are asked than there are turns.
        (2, 1, [1]),
        (100, 7, [1] * 7),
    ],
)
def test_the_closures_of_a_stretch(workers, steps, units):
    fleet = Fleet(workers)
    Led(fleet).run(steps)
    assert fleet.units == units


def test_workers_go_on_while_the_chief_reports_and_rest_at_the_boundary(clock):
    fleet = Fleet(2)
    strategy = led(clock, fleet)
    boundary, steps = 10 * FAST, FAST
    while (report := strategy.advance(steps, boundary)).global_step is not None:
        assert report.loss == LOSS
        assert report.global_step == fleet.applied < boundary
        assert not fleet.done()
    assert fleet.applied == fleet.most == boundary
    assert fleet.done()
    assert fleet.units == [TURN, TURN]


def test_nobody_goes_on_once_all_up_to_the_boundary_is_applied(clock):
    fleet = Fleet(2)
    # The chief checks after ten rounds, when both workers have made their last turn but have not
    # ended their closures.
    report = led(clock, fleet).advance(15 * TURN, 2 * 10 * TURN)
    assert fleet.applied == 2 * 10 * TURN
    assert fleet.done()
    assert report.global_step is None


def test_at_rest_nobody_goes_on_and_all_of_it_is_reported(clock):
    fleet = Fleet(2)
    strategy = led(clock, fleet)
    first = strategy.advance(FAST, 10**6)
    # Turns are dealt for some seconds and not up to the boundary.
    assert fleet.end * TURN < 20 * FAST
    fleet.round()
    report = strategy.rest()
    assert fleet.done()
    assert report.global_step is None
    assert fleet.applied > first.global_step
    assert sum(each["local_steps"] for each in report.metrics["workers"].values()) == fleet.applied
    # Without new updates, the loss stays.
    assert strategy.rest().loss == LOSS
    # After a rest, they go on from there.
    boundary = fleet.applied + 3
    strategy.advance(3, boundary)
    assert fleet.applied == fleet.most == boundary


def test_workers_that_were_faster_than_expected_begin_again(clock):
    fleet = Fleet(2)
    strategy = led(clock, fleet, turn=1)
    # The chief expected one step per second; a round takes a tenth of a second.
    assert strategy.advance(1, 10**6).global_step is None
    applied = fleet.applied
    assert 0 < applied == fleet.end
    assert strategy.advance(2 * applied, 10**6).global_step == fleet.applied > applied


def test_who_found_no_turn_is_sent_a_closure_once_there_are_more(clock):
    fleet = Fleet(2)
    strategy = led(clock, fleet)
    strategy.advance(FAST, 10**6)
    fleet.end = fleet.next
    # Only one of the workers has found no turn left.
    fleet.workers = 1
    fleet.round()
    fleet.workers = 2
    assert len(fleet.queue) == 1
    strategy.advance(FAST, 10**6)
    assert len(fleet.queue) == 2


def test_it_waits_until_an_update_is_reported(clock):
    fleet = Fleet(1, lambda turn: 0 if turn < 50 else None)
    report = led(clock, fleet, turn=1).advance(100, 10**6)
    assert report.loss == LOSS
    assert clock.now > 4 * LOOK_SECONDS


def test_slow_workers_leave_the_unrolled_turns(clock):
    fleet = Fleet(2)
    strategy = led(clock, fleet)
    strategy.advance(FAST, 10**6)
    strategy.advance(TURN, 10**6)
    assert fleet.units == [TURN, TURN, 1, 1]


def test_only_the_first_stretch_in_turns_makes_their_graph(clock):
    fleet = Fleet(2)
    strategy = led(clock, fleet)
    warmed = []
    schedule = fleet.schedule
    fleet.schedule = lambda unit, args: (warmed.append(strategy.warming), schedule(unit, args))
    for steps in (5 * TURN, 8 * TURN, 3, 8 * TURN):
        strategy.run(steps)
        warmed.append("|")
    assert "".join(str(each)[0] for each in warmed) == "FF|TT|FF|FF|"
    assert not strategy.warming


def test_the_staleness_of_a_turn_is_the_updates_of_others_for_each_of_its_own():
    fleet = Fleet(1)
    strategy = Led(fleet)
    fleet.reports[0] = (40.0, 20, 10)
    assert strategy.rest().metrics["staleness_mean"] == 0.5


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


def test_as_many_are_taken_as_were_dealt_and_more_once_more_are_dealt(turns, take):
    turns.deal(1)
    assert [bool(take()) for _ in range(4)] == [True, False, False, False]
    seen = turns.look()
    assert (seen.taken, seen.refused) == (1, 3)
    turns.extend(3)
    assert [bool(take()) for _ in range(4)] == [True, True, False, False]
    seen = turns.look()
    assert (seen.taken, seen.refused) == (3, 5)


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


def take_at_once(turns, closures):
    """Let a thread take turns for each closure, and return how many were taken."""

    @tf.function
    def all_of_a_worker(closure):
        count, own = tf.constant(0), turns.begin(closure)
        while turns.take(own):
            count += 1
        return count

    wanted = [tf.constant(each, tf.int64) for each in closures]
    all_of_a_worker.get_concrete_function(wanted[0])
    with ThreadPoolExecutor(len(wanted)) as pool:
        return sum(pool.map(lambda each: int(all_of_a_worker(each)), wanted))


def test_workers_that_take_at_once_take_exactly_what_is_there(turns):
    dealt, threads = 2000, 8
    turns.deal(dealt)
    assert take_at_once(turns, range(threads)) == turns.look().taken == dealt
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
    turns.deal(300)
    count = take_at_once(turns, [0] * 4)
    assert turns.look().refused >= 1
    # If a replaced run returns its turn after the newest run has found none, a turn is left. The
    # chief then starts another run.
    count += take_at_once(turns, [0])
    assert count == turns.look().taken == 300


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
    assert seen.reports[:, async_parameter_server.LOSS].tolist() == [3.0, 0.0, 1.75]
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
    monkeypatch.setattr(async_parameter_server, "worker_device", lambda _: "/device:CPU:0")

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
