"""How workers take turns of updates from one another, without the chief.

`Turns` are a few numbers on the first server. A worker takes the next turn, makes its updates,
reports them and takes another one, until none is left. The chief says how many turns there are; it
does not hand out each of them. Nothing of this is part of a checkpoint.

A worker that is taken for dead, as its connection to the chief is lost, may go on with its closure,
which is run again elsewhere. Only the newest run of a closure takes turns, and none of a stretch
that is over; a closure that is handed out with its updates asks by the same numbers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.strategies.placement import fetch_value, run_on_device, worker_device

# Updates that are unrolled in a graph. A TensorFlow loop that spans machines is controlled over the
# network: one iteration of it costs more than a small update.
TURN = 20
# A graph of unrolled steps takes seconds to trace, which a shorter run does not win back.
LONG_RUN = 2000
# The columns of the table of reports.
LOSS, UPDATES, OTHERS = range(3)
# Closures of a stretch whose runs are told apart; half a megabyte. The oldest of more than that
# would end before the others.
CLOSURES = 1 << 16
# A portion whose worker dies is run again as a whole: as many steps may count twice.
MAX_PORTION = 100


def portions(steps: int, workers: int, unit: int) -> list[int]:
    """Return the sizes of the portions, larger ones first, for workers of uneven speed.

    A free worker gets a quarter of its share of what is left ("guided self-scheduling",
    Polychronopoulos and Kuck 1987, IEEE Transactions on Computers C-36(12)). All are multiples of
    `unit`, but for the last ones, which are single steps.
    """
    smallest = max(1, steps // (32 * workers))
    cut: list[int] = []
    left = steps
    while left:
        share = min(MAX_PORTION, max(smallest, left // (4 * workers)))
        cut.append(min(left, share // unit * unit or share))
        left -= cut[-1]
    return cut


def choose_unroll(steps: int, *, whole: bool) -> int:
    """Return how many updates are unrolled of so many steps; 1 where rows are looked up."""
    return TURN if whole and steps >= LONG_RUN else 1


def choose_unit(steps: int, workers: int, turn: int) -> int:
    """Return how many updates are made at once of so many that are left: `turn`, or 1 of few."""
    # With fewer turns the wait for the last of them would take most of the time.
    return turn if steps >= 4 * turn * workers else 1


def unit_of_speed(steps: int, workers: int, turn: int, now: int) -> int:
    """Return how many updates workers make at once; `now` changes only where it pays."""
    # One by one an update takes about twice as long as in a turn. A turn is to end within a second,
    # so that a worker which is asked to stop does.
    fewest = 1 if now == turn else 2
    return turn if steps >= fewest * turn * workers else 1


def run_on_workers(workers: int, work: Callable[[], None], seconds: float) -> None:
    """Run operations on each worker that is there; raises `ClusterLostError` after `seconds`."""
    made = tf.function(work, autograph=False).get_concrete_function()

    def one(number: int) -> None:
        with suppress(tf.errors.OpError), run_on_device(worker_device(number)):
            made()

    threads = [
        threading.Thread(target=one, args=(number,), name=f"worker-{number}", daemon=True)
        for number in range(workers)
    ]
    for each in threads:
        each.start()
    deadline = time.monotonic() + seconds
    for each in threads:
        each.join(max(0.0, deadline - time.monotonic()))
        if each.is_alive():
            raise ClusterLostError(
                f"{each.name} has not ended after {seconds:g} s what it did for a chief before"
            )


def alone(work: Callable[[], None]) -> None:
    """Run what a worker does for one chief at a time; in its graph."""
    with tf.device("/device:CPU:0"):
        mutex = tf.raw_ops.MutexV2(shared_name="flotilla-turns")
        lock = tf.raw_ops.MutexLock(mutex=mutex)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    with tf.control_dependencies([lock]):
        work()
    # All of it, and not what it returns: updates return nothing.
    done = graph.get_operations()[before:]
    with tf.device("/device:CPU:0"), tf.control_dependencies([lock, *done]):
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the chief sees of the workers.

    Attributes:
        applied: the exact global step.
        taken: turns since `deal`.
        refused: workers that found no turn left, since `deal`.
        reports: for each worker the sum of all its losses, its updates, and those of others in its
            turns.
    """

    applied: int
    taken: int
    refused: int
    reports: npt.NDArray[np.float64]


class Turns:
    """The turns that are left, and what came of the others; see the module."""

    def __init__(
        self, workers: int, applied: tf.Variable, permit: tf.Variable | None = None
    ) -> None:
        """Make the numbers on the device of `applied`; without the `permit` no turns are dealt."""
        self._applied, self._permit = applied, permit
        self._device = applied.device
        self._next, self._end, self._refused = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)
        )
        self._reports = tf.Variable(tf.zeros([workers, 3], tf.float64), trainable=False)
        # How many closures were begun, ever and before this stretch, and the last run of each.
        self._runs, self._before = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)
        )
        self._newest = tf.Variable(tf.zeros([CLOSURES], tf.int64), trainable=False)
        self._look = tf.function(self._numbers, autograph=False)
        signature = [tf.TensorSpec([], tf.int64)]
        self._begin, self._extend = (
            tf.function(each, autograph=False, input_signature=signature)
            for each in (self._beginning, self._extending)
        )

    def begin(self, closure: tf.Tensor) -> tf.Tensor:
        """Return the run of a closure for `take`: an int64 vector of its place and a new number."""
        with tf.device(self._device):
            run = tf.raw_ops.ResourceCountUpTo(
                resource=self._runs.handle, limit=tf.int64.max, T=tf.int64
            )
            run, place = run + 1, closure % CLOSURES
            with tf.control_dependencies([self._newest.scatter_max(tf.IndexedSlices(run, place))]):
                return tf.stack([place, run])

    def take(self, own: tf.Tensor) -> tf.Tensor:
        """Take a turn for a run, and return whether there was one; in the graph of a worker.

        Never are more taken than `end`: a number that was too high is given back.
        """
        with tf.device(self._device):
            number = tf.raw_ops.ResourceCountUpTo(
                resource=self._next.handle, limit=tf.int64.max, T=tf.int64
            )
            is_left, may_take = number < self._end.read_value(), self.holds(own)
            found = is_left & may_take
            back, refused = (
                tf.cast(each, tf.int64) for each in (tf.logical_not(found), may_take & ~is_left)
            )
            self._next.assign_sub(back, read_value=False)
            # Of a run that is not the newest the chief knows nothing.
            self._refused.assign_add(refused, read_value=False)
            return found

    def holds(self, own: tf.Tensor) -> tf.Tensor:
        """Return whether a run is the newest one of its closure; in the graph of a worker."""
        with tf.device(self._device):
            is_newest = tf.equal(self._newest.sparse_read(own[0]), own[1])
            return is_newest & (own[1] > self._before.read_value())

    def began(self) -> tf.Tensor:
        """Return how many updates were applied; in the graph of a worker, where a turn begins."""
        with tf.device(self._device):
            return self._applied.read_value()

    def report(self, worker: tf.Tensor, loss: tf.Tensor, updates: int, began: tf.Tensor) -> Any:
        """Report a turn with its sum of losses, after all its updates; in a worker's graph."""
        # In one tensor, which is one message.
        sent = tf.stack([tf.cast(each, tf.float64) for each in (worker, loss)])
        with tf.device(self._device):
            worker, loss = tf.unstack(tf.identity(sent))
            others = self._applied.read_value() - began - updates
            row = tf.stack([loss, tf.constant(updates, tf.float64), tf.cast(others, tf.float64)])
            # No two workers write to the same row.
            where = tf.reshape(tf.cast(worker, tf.int64), [1, 1])
            return self._reports.scatter_nd_add(where, tf.reshape(row, [1, -1]))

    def deal(self, turns: int) -> None:
        """Begin with so many turns. Only while no worker takes any."""
        self._begin(tf.constant(turns, tf.int64))

    def extend(self, turns: int) -> None:
        """Say how many turns there are since `deal`; 0 ends all workers after their turn."""
        self._extend(tf.constant(turns, tf.int64))

    def held(self) -> dict[str, tf.Variable]:
        """Return all variables, by what they are."""
        found = (each for each in vars(self).items() if isinstance(each[1], tf.Variable))
        others = (self._applied, self._permit)
        return {
            f"turns/{name.strip('_')}": each
            for name, each in found
            if not any(each is other for other in others)
        }

    def look(self) -> Seen:
        """Return what is there, in one message."""
        applied, taken, refused, *reports = fetch_value(self._look())
        return Seen(
            applied=int(applied),
            taken=int(taken),
            refused=int(refused),
            reports=np.reshape(reports, (-1, 3)),
        )

    def _permitted(self) -> list[tf.Tensor]:
        return [] if self._permit is None else [self._permit.read_value()]

    def _beginning(self, turns: tf.Tensor) -> None:
        with tf.device(self._device), tf.control_dependencies(self._permitted()):
            self._before.assign(self._runs)
            self._next.assign(0)
            self._refused.assign(0)
            self._end.assign(turns)

    def _extending(self, turns: tf.Tensor) -> None:
        with tf.device(self._device), tf.control_dependencies(self._permitted()):
            self._end.assign(turns, read_value=False)

    def _numbers(self) -> Any:
        with tf.device(self._device):
            numbers = [self._applied, self._next, self._refused]
            found = [tf.cast(each.read_value(), tf.float64) for each in numbers]
            return tf.concat([tf.stack(found), tf.reshape(self._reports.read_value(), [-1])], 0)
