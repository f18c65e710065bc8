"""Asynchronous training on parameter servers.

Workers pull the variables, compute a gradient and push it without waiting for each other, and the
parameter servers apply each gradient as it arrives (Dean et al. 2012, "Large Scale Distributed Deep
Networks", section 4.1). For the updates up to the next boundary, such as a checkpoint or a
validation, the chief schedules a closure for each worker through TensorFlow's `ClusterCoordinator`.
A closure takes turns of 1 or 20 updates from counters on the first server (`Turns`) until no turn
is left. The chief sets the number of turns but does not assign them to workers. About once a
second, it reads the workers' reports. At the boundary, it reschedules the updates that a dead
worker took but did not apply.

With `data.partition: dynamic`, each update has its own range of examples. The chief schedules
portions of updates, one closure each, and repeats a portion if its worker dies.

A worker that lost its connection to the chief may continue a closure while another worker repeats
it. Therefore, only the newest run of a closure may take turns, and only until the chief calls
`Turns.deal` again. Portions check the same counters. The counters are not part of a checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer.config.topology import find_topology
from flotilla.trainer.optimizers.loss_scale import LossScale
from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.strategies.gradients import (
    ONE,
    PureGradient,
    Tensors,
    Towers,
    apply_and_count,
    push,
    push_state,
)
from flotilla.trainer.strategies.parameter_server import Call, Served, worker_number
from flotilla.trainer.strategies.placement import (
    fetch_value,
    run_on_device,
    server_device,
    worker_device,
)
from flotilla.trainer.strategies.strategy import Batch, Loss, Problem, Report

log = logging.getLogger(__name__)

# Seconds between reads of the workers' reports, and between checks whether closures still run.
LOOK_SECONDS, AGAIN_SECONDS = 1.0, 0.05
# How many seconds of work the chief schedules in advance. If the chief dies, the workers continue
# for about this time.
AHEAD_SECONDS = 10
# Maximum time to wait for workers to end their current turns, which take up to a second each.
HALT_SECONDS = 20.0
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

Update = Callable[[tf.data.Iterator], tf.Tensor]


class AsyncParameterServer(Served):
    """Training by workers that never wait for each other, with variables on parameter servers."""

    capabilities = find_topology("async_parameter_server").capabilities
    _unit = 0
    #: The global step at the last `Turns.deal`, and the number of closures scheduled since then.
    _began = _sent = 0
    #: The number of closures scheduled in this attempt.
    _closure = 0
    _loss = 0.0

    def build_on_servers(self, problem: Problem) -> None:
        """Build the model and the optimizer on the servers, and the input on the workers."""
        self._workers = self.cluster.count("worker")
        self._iterator = self.worker_batches(problem)
        self.build_model(problem)
        training = self.config.training
        make = self._local_steps if training.pull_every > 1 else self._step
        self.hand_out(make(problem), choose_unroll(training.steps, whole=self.pulls_whole()))

    def hand_out(self, update: Update, turn: int) -> None:
        """Create the turn counters and the closures. A turn has at most `turn` updates."""
        self._tally, self._turn, self._has_turned = self.tally(), turn, False
        with tf.device(server_device(0)):
            self._turns = Turns(self._workers, self.applied, self.state and self.state.permit)
        self.keep(self._turns.list_variables())
        if self.state and self.state.taken:
            self._turns.extend(0)
            run_on_workers(self._workers, lambda: run_exclusively(lambda: None), HALT_SECONDS)
        self._read_reports()
        self._reported = self._seen.reports
        make = self._portion if self.stream else self._loop
        self._closures = {unit: make(update, unit) for unit in (1, TURN)}

    def run(self, steps: int) -> Report:
        """Apply `steps` updates on any free workers, and wait until all are applied."""
        return self.advance(steps, self.global_step() + steps)

    def advance(self, steps: int, boundary: int) -> Report:
        """Schedule updates up to `boundary`. If at most `steps` are left, wait for all of them."""
        if self.stream:
            return self._portions(steps)
        if not self._unit:
            self._read_reports()
        if boundary - self._seen.applied <= steps:
            self._complete(boundary)
        else:
            self._deal_ahead(steps, boundary)
        return self._report()

    def rest(self) -> Report:
        """Stop each worker after its current turn, and report the updates since the last report."""
        self._end()
        return self._report()

    def _read_reports(self) -> None:
        self._seen = self._turns.look()
        self.read_step = self._seen.applied

    def _deal_ahead(self, steps: int, boundary: int) -> None:
        """Schedule turns for the next few seconds, and wait until a worker reports new updates."""
        unit = adjust_unit(steps, self._workers, self._turn, self._unit)
        if self._unit not in {0, unit}:
            self._end()
        self._deal(max(AHEAD_SECONDS * steps // unit, 2 * self._workers), boundary, unit)
        end = time.monotonic() + LOOK_SECONDS
        while not self.coordinator.done():
            time.sleep(AGAIN_SECONDS)
            if time.monotonic() < end:
                continue
            self._read_reports()
            if self._seen.applied >= boundary:
                break
            if self._seen.reports[:, UPDATES].sum() > self._reported[:, UPDATES].sum():
                return
        # The workers have taken all turns, so wait for their closures to end.
        self._join()

    def _complete(self, boundary: int) -> None:
        while (left := boundary - self._seen.applied) > 0:
            self._deal(left, boundary, self._unit or choose_unit(left, self._workers, self._turn))
            self._join()

    def _deal(self, ahead: int, boundary: int, unit: int) -> None:
        """Schedule `ahead` turns beyond those already taken, but none past `boundary`."""
        if not self._unit:
            self._unit, self._began, self._sent = unit, self._seen.applied, 0
            dealt = min(ahead, (boundary - self._began) // unit)
            self._turns.deal(dealt)
            taken = refused = 0
        else:
            dealt = min(self._seen.taken + ahead, (boundary - self._began) // unit)
            self._turns.extend(dealt)
            # Read the counters after `extend`, because a worker that found no turn earlier has
            # ended its closure.
            self._read_reports()
            taken, refused = self._seen.taken, self._seen.refused
        self.warming = unit > 1 and not self._has_turned
        # Count a dead worker's closure too: it runs again as soon as any worker is free.
        for _ in range(min(self._workers, dealt - taken) - (self._sent - refused)):
            arguments = self._iterator, tf.constant(self._closure, tf.int64)
            self.coordinator.schedule(self._closures[unit], args=arguments)
            self._sent, self._closure = self._sent + 1, self._closure + 1

    def _end(self) -> None:
        self._turns.extend(0)
        self._join()

    def _join(self) -> None:
        self.coordinator.join()
        self._unit = 0
        self._read_reports()

    def _report(self) -> Report:
        new = self._seen.reports - self._reported
        self._reported = self._seen.reports
        if updates := new[:, UPDATES].sum():
            self._loss = float(new[:, LOSS].sum() / updates)
            self._has_turned |= self.warming
            self.warming = False
        for index, row in enumerate(new):
            if made := int(row[UPDATES]):
                self._count(index, made, row[OTHERS])
        reached = self._seen.applied if self._unit else None
        return Report(loss=self._loss, metrics=self.metrics(), global_step=reached)

    def _count(self, worker: int, updates: int, others: float) -> None:
        # A worker pulls right after each push, so every update by another worker falls between one
        # of its pulls and the following push, and counts toward its staleness.
        steps = updates * self.config.training.pull_every
        self._tally.add(f"worker-{worker}", steps, staleness=others / updates)

    def _loop(self, update: Update, turn: int) -> Callable[..., tf.Tensor]:
        turns = self._turns

        @tf.function(autograph=False)
        def loop(iterator: tf.data.Iterator, closure: tf.Tensor) -> tf.Tensor:
            # Keep `own` on the server, because the server needs it at every turn.
            own, worker = turns.begin(closure), worker_number()

            def once(_: tf.Tensor) -> tuple[tf.Tensor]:
                began, total = turns.read_applied(), tf.constant(0.0)
                for _ in range(turn):
                    total += update(iterator)
                with tf.control_dependencies([turns.report(worker, total, turn, began)]):
                    return (turns.take(own),)

            def turn_by_turn() -> None:
                # TensorFlow evaluates a loop's condition on the worker, so the body takes the next
                # turn on the server.
                tf.while_loop(lambda found: found, once, (turns.take(own),))

            if self.state:
                with tf.control_dependencies([own]):
                    run_exclusively(turn_by_turn)
            else:
                turn_by_turn()
            return worker

        return loop  # type: ignore[no-any-return]

    def _portions(self, steps: int) -> Report:
        """Apply `steps` updates in portions, each on its own range of examples."""
        unit = choose_unit(steps, self._workers, self._turn)
        sizes = portions(steps, self._workers, unit)
        self.warming = unit > 1 and not self._has_turned
        total, left = 0.0, list(zip(accumulate(sizes, initial=0), sizes, strict=False))
        while left:
            ended = self.dispatch(
                [
                    self._build_call(size, unit, before * self._batches_of_update())
                    for before, size in left
                ]
            )
            again = []
            for (before, size), (loss, worker, others, made) in zip(left, ended, strict=True):
                total += loss
                if made:
                    self._count(int(worker), int(made), others)
                # A newer run of the closure stopped this one early. Repeat the missing updates.
                if made < size:
                    again.append((before + int(made), size - int(made)))
            left = again
        self.advance_position(steps * self._batches_of_update())
        self._has_turned |= self.warming
        self.warming = False
        return Report(loss=total / steps, metrics=self.metrics())

    def _batches_of_update(self) -> int:
        return self.config.training.pull_every * self.batches_of_step()

    def _build_call(self, steps: int, unit: int, batches: int) -> Call:
        turn = 1 if steps % TURN else unit
        number = tf.constant(self._closure, tf.int64)
        self._closure += 1
        arguments = (self._iterator, tf.constant(steps // turn), number, *self.lease(batches))
        return self._closures[turn], arguments

    def _portion(self, update: Update, turn: int) -> Callable[..., tf.Tensor]:
        """Return a closure that runs turns of `turn` updates on leased examples."""
        applied, turns = self.applied, self._turns

        @tf.function(autograph=False)
        def portion(
            iterator: tf.data.Iterator, count: tf.Tensor, closure: tf.Tensor, *lease: tf.Tensor
        ) -> tf.Tensor:
            own, updates = turns.begin(closure), count * turn
            iterator = self.lend(iterator, updates * self._batches_of_update(), *lease)
            before = applied.read_value()

            def once(_: tf.Tensor, total: tf.Tensor, made: tf.Tensor) -> tuple[tf.Tensor, ...]:
                # The updates do not wait for this check, so a run may take one more turn after a
                # newer run has replaced it.
                holds = turns.holds(own)
                for _ in range(turn):
                    total += update(iterator)
                return holds & (made + 1 < count), total, made + 1

            none = turns.holds(own), tf.constant(0.0), tf.constant(0)
            _, total, made = tf.while_loop(lambda found, *_: found, once, none)
            others = applied.read_value() - before - tf.cast(made * turn, tf.int64)
            # Return a single tensor, because the coordinator fetches each tensor separately.
            results = [total, worker_number(), others, made * turn]
            return tf.stack([tf.cast(each, tf.float64) for each in results])

        return portion  # type: ignore[no-any-return]

    def _step(self, problem: Problem) -> Update:
        gradient = self.gradient(problem)

        def step(batch: Batch) -> tf.Tensor:
            value, found = gradient(batch)
            apply_and_count(self.optimizer, found, self.model.trainable_variables)
            return value

        # Keras updates variables only in a replica context, and closures are traced without one.
        return lambda iterator: self.connected.run(step, args=(self.towers.take(iterator),))

    def _local_steps(self, problem: Problem) -> Update:
        training = self.config.training
        steps = build_local_steps(
            self.model,
            self.optimizer,
            problem.loss,
            steps=training.pull_every,
            jit=training.jit_compile,
            scale=self.scale,
            towers=self.towers,
        )
        return lambda iterator: self.connected.run(steps, args=(iterator,))


def build_local_steps(  # noqa: PLR0913
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: Loss,
    *,
    steps: int,
    jit: bool,
    scale: LossScale | None = None,
    towers: Towers = ONE,
) -> Callable[[Any], tf.Tensor]:
    """Return a function that pulls once, takes `steps` local steps, and pushes once.

    The local steps are plain SGD. The function pushes the sum of their gradients, which the
    server's optimizer applies as one update (Downpour SGD, Dean et al. 2012, section 4.1, n_fetch =
    n_push = `steps`). The function takes an iterator of batches and returns the mean loss.
    """
    pure = PureGradient(model, loss, jit=jit, scale=scale)
    compute = towers.pure(pure, pure.state)

    def update(iterator: Any) -> tf.Tensor:
        values = pure.pull()
        # Read the learning rate before the loop: a server computes it, but the loop must be local.
        rate = tf.identity(tf.cast(optimizer.learning_rate, tf.float32))

        def step(
            made: tf.Tensor, weights: Tensors, state: Tensors, total: Tensors, losses: tf.Tensor
        ) -> tuple[Any, ...]:
            value, found, state = compute(weights, state, towers.take(iterator))
            weights = [w - tf.cast(rate, w.dtype) * g for w, g in zip(weights, found, strict=True)]
            total = [t + g for t, g in zip(total, found, strict=True)]
            return made + 1, weights, state, total, losses + value

        zeros = [tf.zeros_like(each) for each in values.weights]
        _, _, state, total, losses = tf.while_loop(
            lambda made, *_: made < steps,
            step,
            (tf.constant(0), values.weights, values.state, zeros, tf.constant(0.0)),
        )
        apply_and_count(optimizer, push(model, total), model.trainable_variables)
        push_state(pure.state, values.state, pure.merge_moved(values.state, state))
        return losses / steps

    return update


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
