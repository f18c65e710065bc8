"""How workers take turns of updates from one another, without the chief.

`Turns` are a few numbers on the first server. A worker takes the next turn, makes its updates,
reports them and takes another one, until none is left. The chief says how many turns there are; it
does not hand out each of them. Nothing of this is part of a checkpoint.

A worker that is taken for dead, as its connection to the chief is lost, may go on with its closure,
which is run again elsewhere. Only the newest run of a closure takes turns, and none of a stretch
that is over; a closure that is handed out with its updates asks by the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from trainer.strategies.placement import fetched
from trainer.strategies.remade import Remade

# The columns of the table of reports.
LOSS, UPDATES, OTHERS = range(3)
# Closures of a stretch whose runs are told apart; half a megabyte. The oldest of more than that
# would end before the others.
CLOSURES = 1 << 16
# No process of a server sees as many runs of closures.
_RUNS_OF_SERVER = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the chief sees of the workers.

    Attributes:
        applied: the exact global step.
        taken: turns since `deal`.
        refused: workers that found no turn left, since `deal`.
        reports: for each worker the sum of its losses, its updates, and the updates of others
            in its turns; of all turns that were reported, not only since `deal`.
    """

    applied: int
    taken: int
    refused: int
    reports: npt.NDArray[np.float64]


class Turns:
    """The turns that are left, and what came of the others; see the module."""

    def __init__(self, workers: int, applied: tf.Variable) -> None:
        """Make the numbers on the device of the scope, which has to be that of `applied`."""
        self._applied = applied
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
        # How often all of them were lost with their server.
        self._losses = 0
        self._look = tf.function(self._numbers, autograph=False)
        self._set = tf.function(self._begin, autograph=False)

    def begin(self, closure: tf.Tensor) -> tf.Tensor:
        """Return the run of a closure of this number, for `take`; in the graph of a worker.

        It is an int64 vector, on the server, of its place and a number that no other run has.
        """
        with tf.device(self._device):
            run = tf.raw_ops.ResourceCountUpTo(
                resource=self._runs.handle, limit=tf.int64.max, T=tf.int64
            )
            run, place = run + 1, closure % CLOSURES
            with tf.control_dependencies([self._newest.scatter_max(tf.IndexedSlices(run, place))]):
                return tf.stack([place, run])

    def take(self, own: tf.Tensor) -> tf.Tensor:
        """Take a turn for a run, and return whether there was one; in the graph of a worker.

        Turns are taken by atomic additions. Never are more taken than `end`: a number that was
        too high is given back, and meanwhile others see too many as taken, not too few.
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
        """Report a turn with its sum of losses; in the graph of a worker, where it ends.

        What is returned is done after all updates of the turn.
        """
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
        self._set(tf.constant(turns, tf.int64))

    def extend(self, turns: int) -> None:
        """Say how many turns there are since `deal`; 0 ends all workers after their turn."""
        self._end.assign(turns)

    def remake(self, remade: Remade) -> bool:
        """Make all of it again where it is gone, without a turn; return whether it was."""
        held = (self._next, self._end, self._refused, self._reports, self._newest)
        runs = (self._runs, self._before)
        if not all(remade.variable(each) for each in (*held, *runs)):
            return False
        self._losses += 1
        # No two runs have the same number: workers keep what they cache by it.
        for each in runs:
            each.assign(self._losses * _RUNS_OF_SERVER)
        return True

    def look(self) -> Seen:
        """Return what is there, in one message."""
        applied, taken, refused, *reports = fetched(self._look())
        return Seen(
            applied=int(applied),
            taken=int(taken),
            refused=int(refused),
            reports=np.reshape(reports, (-1, 3)),
        )

    def _begin(self, turns: tf.Tensor) -> None:
        with tf.device(self._device):
            self._before.assign(self._runs)
            self._next.assign(0)
            self._refused.assign(0)
            self._end.assign(turns)

    def _numbers(self) -> Any:
        with tf.device(self._device):
            numbers = [self._applied, self._next, self._refused]
            found = [tf.cast(each.read_value(), tf.float64) for each in numbers]
            return tf.concat([tf.stack(found), tf.reshape(self._reports.read_value(), [-1])], 0)
