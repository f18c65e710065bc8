"""Asynchronous training on parameter servers.

Workers pull the variables, compute a gradient and push it without waiting for each other, and the
parameter servers apply each gradient as it arrives (Dean et al. 2012, "Large Scale Distributed Deep
Networks", section 4.1). For the updates up to the next boundary, such as a checkpoint or a
validation, the chief schedules a closure for each worker through TensorFlow's `ClusterCoordinator`.
A closure takes turns of 1 or 20 updates (`Turns`) until no turn is left. About once a second, the
chief reads the workers' reports. At the boundary, it reschedules the updates that a dead worker
took but did not apply.

With `data.partition: dynamic`, each update has its own range of examples. The chief schedules
portions of updates, one closure each, and repeats a portion if its worker dies. A worker that was
considered dead but is still running stops its portion.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.config.topology import find_topology
from flotilla.trainer.optimizers.loss_scale import LossScale
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
from flotilla.trainer.strategies.placement import server_device
from flotilla.trainer.strategies.self_scheduling import (
    LOSS,
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
from flotilla.trainer.strategies.strategy import Batch, Loss, Problem, Report

log = logging.getLogger(__name__)

# Seconds between reads of the workers' reports, and between checks whether closures still run.
LOOK_SECONDS, AGAIN_SECONDS = 1.0, 0.05
# How many seconds of work the chief schedules in advance. If the chief dies, the workers continue
# for about this time.
AHEAD_SECONDS = 10
# Maximum time to wait for workers to end their current turns, which take up to a second each.
HALT_SECONDS = 20.0

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
