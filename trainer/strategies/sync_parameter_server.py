"""Synchronous training on parameter servers, with backup workers.

One update is the mean of the first N gradients of M workers; what comes later is stale and dropped,
so that M - N slow or lost workers hold nobody up (Chen et al. 2016, "Revisiting Distributed
Synchronous SGD", section 3).

For each update the chief opens a step: it gives every worker a token. A worker takes its newest
token, computes one gradient of that step, lays it down on the servers (`Staging`), and only then
announces it. The first N announcements of the open step are the update; what stands behind an
announcement is taken as a whole or dropped as a whole. Workers loop by themselves for as long as
the chief lives, and the chief's part of an update is a function that runs on the servers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import tensorflow as tf

from trainer.strategies.interface import Problem, Report
from trainer.strategies.placement import server_device
from trainer.strategies.served import Served
from trainer.strategies.staging import Gradient, Staging, added, divided
from trainer.strategies.tally import Tally, worker_name

# Where tokens are given and announcements taken.
DESK = server_device(0)
# The step that ends the loops of the workers.
END = tf.int64.max
# What an announcement says beside the loss.
STEP, NUMBER, WORKER = range(3)


class SyncParameterServer(Served):
    """One chief, parameter servers, and workers of which the first N make an update."""

    def build(self, problem: Problem) -> None:
        """Connect, place model and optimizer, lay out tokens and announcements."""
        self.connect()
        self.build_model(problem)
        self._workers = self.cluster.count("worker")
        self._needed = self.config.training.replicas_to_aggregate or self._workers
        self._tally = Tally(batch_size=self.config.training.batch_size)
        self._dropped = 0
        with tf.device(DESK):
            self._open = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._numbers = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._tokens = [tf.queue.FIFOQueue(-1, [tf.int64], [[]]) for _ in range(self._workers)]
            self._announced = tf.queue.FIFOQueue(-1, [tf.int64, tf.float32], [[3], []])
        self._staging = Staging([each.value for each in self.model.trainable_variables])
        self._iterator = self.worker_batches(problem)
        self._loop = self._loop_of_worker(problem)
        self._updates = self._updates_of_chief()
        self._watch: _Watch | None = None

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, each the mean of the first gradients of its step."""
        watch = self._watch = self._watch or self._started()
        try:
            loss, accepted, dropped = self._updates(tf.constant(steps))
        except tf.errors.OpError as error:
            raise watch.error or error from error
        for worker, (taken, refused) in enumerate(
            zip(accepted.numpy(), dropped.numpy(), strict=True)
        ):
            self._tally.add(f"worker-{worker}", int(taken + refused))
            self._dropped += int(refused)
        figures = {**self._tally.figures(), "dropped_gradients": self._dropped}
        return Report(loss=float(loss) / steps, figures=figures)

    def close(self) -> None:
        """Let the workers' loops end."""
        # Servers that are gone have nothing left to end.
        with suppress(tf.errors.OpError):
            self._open_step(tf.constant(END))

    def _started(self) -> _Watch:
        """Start a loop on every worker, now that it is known which step is the first."""
        self._open.assign(self.applied.read_value())
        for tokens in self._tokens:
            self.coordinator.schedule(self._loop, args=(self._iterator, tokens.queue_ref))
        return _Watch(self.coordinator, self._announced)

    def _open_step(self, step: tf.Tensor) -> None:
        self._open.assign(step)
        for tokens in self._tokens:
            tokens.enqueue(step)

    def _loop_of_worker(self, problem: Problem) -> Callable[..., tf.Tensor]:
        gradient = self.gradient(problem)

        @tf.function
        def loop(iterator: tf.data.Iterator, tokens: tf.Tensor) -> tf.Tensor:
            worker = _number_of_worker()
            with tf.device(DESK):
                worker = tf.identity(worker)
                # A loop is begun again after its worker died, with a step open and its token taken.
                step = self._open.read_value()
                # The dead one may still stand in line for a token: this one is for it.
                tf.raw_ops.QueueEnqueueV2(handle=tokens, components=[step])
                while step < END:
                    with tf.device(None):
                        # The coordinator traces in the scope of its strategy, where Keras updates
                        # state (moving averages, seeds) in a replica's context only.
                        loss, found = self.connected.run(gradient, args=(next(iterator),))
                    with tf.control_dependencies([self._announce(step, worker, loss, found)]):
                        step = _later(tokens, step)
            return worker

        return loop  # type: ignore[no-any-return]

    def _announce(
        self, step: tf.Tensor, worker: tf.Tensor, loss: tf.Tensor, found: list[Gradient]
    ) -> tf.Operation:
        with tf.device(DESK):
            # In one piece on the server, unlike to add and then to read.
            number = tf.raw_ops.ResourceCountUpTo(
                resource=self._numbers.handle, limit=END, T=tf.int64
            )
        with tf.control_dependencies(self._staging.put(number, found)), tf.device(DESK):
            return self._announced.enqueue([tf.stack([step, number, worker]), loss])

    def _updates_of_chief(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, ...]]:
        variables = self.model.trainable_variables

        @tf.function
        def updates(steps: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.device(DESK):
                # What a loop needs lies where the loop runs, or it asks for it each time around.
                steps = tf.identity(steps)
                total = tf.constant(0.0)
                accepted = dropped = tf.zeros([self._workers], tf.int64)
                for _ in tf.range(steps):
                    step = self.applied.read_value()
                    self._open_step(step)
                    loss, means, taken, refused = self._first(step)
                    # Counted when there is something to apply, and not before.
                    with tf.control_dependencies([loss]):
                        self.optimizer.apply(means, variables)
                    total, accepted, dropped = total + loss, accepted + taken, dropped + refused
            return total, accepted, dropped

        return updates  # type: ignore[no-any-return]

    def _first(self, step: tf.Tensor) -> tuple[Any, ...]:
        """Return the means of loss and gradient over the first that are announced of an open step.

        Beside them the number of gradients that were taken and refused, by worker.
        """
        taken = refused = tf.zeros([self._workers], tf.int64)
        losses, total = tf.constant(0.0), None
        for _ in range(self._needed):
            what, loss, stale = self._next(step)
            gradient = self._staging.take(what[NUMBER])
            total = gradient if total is None else added(total, gradient)
            losses += loss
            taken += self._one_of(what[WORKER])
            refused += stale
        return losses / self._needed, divided(total or [], self._needed), taken, refused

    def _next(self, step: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the next announcement of an open step, its loss, and who was refused before it."""
        refused = tf.zeros([self._workers], tf.int64)
        what, loss = self._announced.dequeue()
        while what[STEP] < step:
            self._staging.take(what[NUMBER])
            refused += self._one_of(what[WORKER])
            what, loss = self._announced.dequeue()
        return what, loss, refused

    def _one_of(self, worker: tf.Tensor) -> tf.Tensor:
        return tf.one_hot(worker, self._workers, dtype=tf.int64)


def _later(tokens: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
    """Wait for a token of a later step and return that step, the newest if there are several."""
    newest = _newest(tokens)
    while newest <= step:
        newest = _newest(tokens)
    return newest


def _newest(tokens: tf.Tensor) -> tf.Tensor:
    with tf.device(DESK):
        count = tf.maximum(tf.raw_ops.QueueSizeV2(handle=tokens), 1)
        (taken,) = tf.raw_ops.QueueDequeueManyV2(handle=tokens, n=count, component_types=[tf.int64])
        return tf.ensure_shape(taken[-1], [])


def _number_of_worker() -> tf.Tensor:
    """Return the number of the worker that runs this graph."""
    return tf.strings.to_number(tf.strings.regex_replace(worker_name(), ".*-", ""), tf.int64)


class _Watch:
    """Waits for an error of the workers' loops, which nobody else would wait for.

    The chief waits for gradients: when a loop has failed for good, the line of announcements is
    closed, so that the wait ends too.
    """

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, line: tf.queue.FIFOQueue
    ) -> None:
        self.error: Exception | None = None
        self._coordinator = coordinator
        self._line = line
        threading.Thread(target=self._wait, name="workers", daemon=True).start()

    def _wait(self) -> None:
        try:
            self._coordinator.join()
        # A loop may fail in any way: it is the user's model that runs in it.
        except Exception as error:
            self.error = error
            with suppress(tf.errors.OpError):
                self._line.close(cancel_pending_enqueues=True)
