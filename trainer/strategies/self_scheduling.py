"""Self-scheduling: workers take turns of updates from a shared counter, without the chief.

`Turns` holds the counters on the first server. A worker takes the next turn, applies its updates
and reports them, and repeats this until no turn is left. The chief sets the number of turns but
does not assign them to workers. The counters are not part of a checkpoint.

A worker that lost its connection to the chief may continue a closure while another worker repeats
it. Therefore, only the newest run of a closure may take turns, and only until the chief calls
`deal` again. Portions of updates (`data.partition: dynamic`) check the same counters.
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

# Number of updates to unroll in a graph. In a loop over several machines, TensorFlow sends control
# messages through the network, so one iteration costs more than a small update.
TURN = 20
# Minimum number of steps for unrolling, because tracing an unrolled graph takes seconds.
LONG_RUN = 2000
LOSS, UPDATES, OTHERS = range(3)
# Number of closures whose newest run is recorded. The records take half a megabyte. If there were
# more closures than this between two calls of `deal`, the oldest ones would end early.
CLOSURES = 1 << 16
# Maximum number of steps in a portion. If its worker dies, up to this many are applied twice.
MAX_PORTION = 100


def portions(steps: int, workers: int, unit: int) -> list[int]:
    """Divide `steps` into portions, largest first, to balance workers of different speeds.

    A free worker gets a quarter of its share of the remaining steps ("guided self-scheduling",
    Polychronopoulos and Kuck 1987, IEEE Transactions on Computers C-36(12)). All sizes except the
    last ones are multiples of `unit`.
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
    """Return the number of updates to unroll: `TURN` in a long run without row lookups, else 1."""
    return TURN if whole and steps >= LONG_RUN else 1


def choose_unit(steps: int, workers: int, turn: int) -> int:
    """Return the number of updates per turn: `turn`, or 1 if only a few steps are left."""
    # With fewer than four turns per worker, workers would mostly wait for the last turns to end.
    return turn if steps >= 4 * turn * workers else 1


def adjust_unit(steps: int, workers: int, turn: int, now: int) -> int:
    """Return the number of updates per turn, with hysteresis around the current number `now`."""
    # A turn should end within a second, so that a worker stops soon after a request. Single updates
    # take about twice as long as those in a turn, so a margin prevents switching back and forth.
    fewest = 1 if now == turn else 2
    return turn if steps >= fewest * turn * workers else 1


def run_on_workers(workers: int, work: Callable[[], None], seconds: float) -> None:
    """Run `work` on each reachable worker. Raises `ClusterLostError` after `seconds`."""
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
                f"{each.name} has not finished its work for an earlier chief after {seconds:g} s"
            )


def run_exclusively(work: Callable[[], None]) -> None:
    """Run `work` in a worker's graph under a mutex, so that a worker serves one chief at a time."""
    with tf.device("/device:CPU:0"):
        mutex = tf.raw_ops.MutexV2(shared_name="flotilla-turns")
        lock = tf.raw_ops.MutexLock(mutex=mutex)
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    with tf.control_dependencies([lock]):
        work()
    # Wait for all operations of `work`, because updates return no value.
    done = graph.get_operations()[before:]
    with tf.device("/device:CPU:0"), tf.control_dependencies([lock, *done]):
        tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The turn counters and the workers' reports, as read by the chief.

    Attributes:
        applied: the exact global step.
        taken: the number of turns that workers have taken since `deal`.
        refused: the number of workers that have found no turn left since `deal`.
        reports: one row for each worker: the sum of its losses, the number of its updates, and the
            number of updates by other workers during its turns.
    """

    applied: int
    taken: int
    refused: int
    reports: npt.NDArray[np.float64]


class Turns:
    """The turn counters and the reports of the workers, on one server."""

    def __init__(
        self, workers: int, applied: tf.Variable, permit: tf.Variable | None = None
    ) -> None:
        """Create the variables on the device of `applied`.

        With a `permit`, `deal` and `extend` fail once the next chief has removed the permit.
        """
        self._applied, self._permit = applied, permit
        self._device = applied.device
        self._next, self._end, self._refused = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(3)
        )
        self._reports = tf.Variable(tf.zeros([workers, 3], tf.float64), trainable=False)
        # The number of closure runs started in total, and before the last call of `deal`.
        self._runs, self._before = (
            tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)
        )
        self._newest = tf.Variable(tf.zeros([CLOSURES], tf.int64), trainable=False)
        self._look = tf.function(self._numbers, autograph=False)
        signature = [tf.TensorSpec([], tf.int64)]
        self._begin, self._extend = (
            tf.function(each, autograph=False, input_signature=signature)
            for each in (self._trace_begin, self._trace_extend)
        )

    def begin(self, closure: tf.Tensor) -> tf.Tensor:
        """Start a run of a closure. Return its slot and number as an int64 vector for `take`."""
        with tf.device(self._device):
            run = tf.raw_ops.ResourceCountUpTo(
                resource=self._runs.handle, limit=tf.int64.max, T=tf.int64
            )
            run, place = run + 1, closure % CLOSURES
            with tf.control_dependencies([self._newest.scatter_max(tf.IndexedSlices(run, place))]):
                return tf.stack([place, run])

    def take(self, own: tf.Tensor) -> tf.Tensor:
        """Take a turn for the run `own`, in a worker's graph, and return whether one was left.

        If the run may not take the turn, the counter is decremented, so that no turn is lost.
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
            # Do not count a run that was replaced, because the chief counts each closure once.
            self._refused.assign_add(refused, read_value=False)
            return found

    def holds(self, own: tf.Tensor) -> tf.Tensor:
        """Return whether a run is the newest of its closure, and started after the last `deal`.

        The operations run in a worker's graph.
        """
        with tf.device(self._device):
            is_newest = tf.equal(self._newest.sparse_read(own[0]), own[1])
            return is_newest & (own[1] > self._before.read_value())

    def read_applied(self) -> tf.Tensor:
        """Read the global step at the start of a turn. Runs in a worker's graph."""
        with tf.device(self._device):
            return self._applied.read_value()

    def report(self, worker: tf.Tensor, loss: tf.Tensor, updates: int, began: tf.Tensor) -> Any:
        """Report a turn that began at global step `began`. Runs in a worker's graph."""
        sent = tf.stack([tf.cast(each, tf.float64) for each in (worker, loss)])
        with tf.device(self._device):
            worker, loss = tf.unstack(tf.identity(sent))
            others = self._applied.read_value() - began - updates
            row = tf.stack([loss, tf.constant(updates, tf.float64), tf.cast(others, tf.float64)])
            # Each worker adds only to its own row.
            where = tf.reshape(tf.cast(worker, tf.int64), [1, 1])
            return self._reports.scatter_nd_add(where, tf.reshape(row, [1, -1]))

    def deal(self, turns: int) -> None:
        """Reset the counters, and allow `turns` turns. No worker may take turns during the call."""
        self._begin(tf.constant(turns, tf.int64))

    def extend(self, turns: int) -> None:
        """Set the total turns since `deal`. With 0, each worker stops after its current turn."""
        self._extend(tf.constant(turns, tf.int64))

    def list_variables(self) -> dict[str, tf.Variable]:
        """Return the variables that this object has created, by name."""
        found = (each for each in vars(self).items() if isinstance(each[1], tf.Variable))
        others = (self._applied, self._permit)
        return {
            f"turns/{name.strip('_')}": each
            for name, each in found
            if not any(each is other for other in others)
        }

    def look(self) -> Seen:
        """Read the global step, the turn counters and the reports in one message."""
        applied, taken, refused, *reports = fetch_value(self._look())
        return Seen(
            applied=int(applied),
            taken=int(taken),
            refused=int(refused),
            reports=np.reshape(reports, (-1, 3)),
        )

    def _read_permit(self) -> list[tf.Tensor]:
        return [] if self._permit is None else [self._permit.read_value()]

    def _trace_begin(self, turns: tf.Tensor) -> None:
        with tf.device(self._device), tf.control_dependencies(self._read_permit()):
            self._before.assign(self._runs)
            self._next.assign(0)
            self._refused.assign(0)
            self._end.assign(turns)

    def _trace_extend(self, turns: tf.Tensor) -> None:
        with tf.device(self._device), tf.control_dependencies(self._read_permit()):
            self._end.assign(turns, read_value=False)

    def _numbers(self) -> Any:
        with tf.device(self._device):
            numbers = [self._applied, self._next, self._refused]
            found = [tf.cast(each.read_value(), tf.float64) for each in numbers]
            return tf.concat([tf.stack(found), tf.reshape(self._reports.read_value(), [-1])], 0)
