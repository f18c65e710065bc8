"""Synchronous training on parameter servers, with backup workers.

One update is the mean of the first N gradients of M workers. Later gradients are stale and are
dropped, so that up to M - N slow workers delay nothing (Chen et al. 2016, "Revisiting Distributed
Synchronous SGD", section 3).

After each update the chief opens the next step: it puts a token into the queue of every worker. A
worker takes the token, computes one gradient, stages it on the servers (`Staging`), and then
announces it. The first N announced gradients of the open step form the update. A gradient is used
whole or not at all. In an inner loop, each worker runs a single function for all steps. The chief
also runs a single function, whose operations are placed on the servers.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from flotilla.trainer.config.topology import find_topology
from flotilla.trainer.embeddings.embedding_table import list_state
from flotilla.trainer.strategies.async_parameter_server import LONG_RUN
from flotilla.trainer.strategies.gradients import Gradient, add_gradients, divide_gradient
from flotilla.trainer.strategies.input_position import Batches, encode_plan
from flotilla.trainer.strategies.parameter_server import LoopWatch, Served, worker_number
from flotilla.trainer.strategies.placement import fetch_value, server_device
from flotilla.trainer.strategies.strategy import Problem, Report

# The device that holds tokens and announcements and runs the chief's loop.
HUB = server_device(0)
# Number of steps to unroll in a worker's graph. The condition of a loop costs a message to every
# device in the loop, and each iteration costs another one.
TURN = 10
# Indices of the fields of an announcement. The loss is separate.
STEP, NUMBER, WORKER, LOOP = range(4)


class SyncParameterServer(Served):
    """Training with parameter servers. An update uses only the first N gradients of a step."""

    capabilities = find_topology("sync_parameter_server").capabilities

    def build_on_servers(self, problem: Problem) -> None:
        """Build the model and the optimizer, and create the queues."""
        self._workers = self.cluster.count("worker")
        self._needed = self.config.training.replicas_to_aggregate or self._workers
        self.build_model(problem, gradients=self._needed)
        self.keep({})
        self._tally = self.tally()
        self._dropped = 0
        # Use unique names, because waiting functions of a dead chief remain on the servers.
        attempt = uuid.uuid4().hex
        with tf.device(HUB):
            self._open = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._numbers = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._announced = NamedQueue(
                [tf.int64, tf.float32], [[4], []], name=f"announced-{attempt}"
            )
            self._tokens = [
                NamedQueue([tf.int64], [[]], name=f"tokens-{index}-{attempt}")
                for index in range(self._workers)
            ]
        self._staging = self._create_staging(f"gradients-{attempt}")
        self._iterator = self.worker_batches(problem)
        self._loop = self._loop_of_worker(problem)
        self._updates = self._updates_of_chief()
        self._watch = LoopWatch(self.coordinator, self._announced.close)

    def run(self, steps: int) -> Report:
        """Apply `steps` updates. Each is the mean of the first gradients of its step."""
        begin = tf.constant(self.global_step(), tf.int64)
        self._open.assign(begin)
        # Late workers of the previous inner loop may take numbers too. Their gradients are dropped.
        numbers = self._numbers.read_value()
        lease = (encode_plan(self.position), numbers) if self.stream else ()
        for number, tokens in enumerate(self._tokens):
            own = tokens.handle, tf.constant(number, tf.int64), begin + steps
            # The chief does not wait for the loops, because a late worker ends its loop by itself.
            self.coordinator.schedule(self._loop, args=(self._iterator, *own, *lease))
        self._watch.begin()
        try:
            loss, accepted, dropped, used = self._updates(tf.constant(steps))
        except tf.errors.OpError as error:
            raise self._watch.error or error from error
        counts = zip(fetch_value(accepted), fetch_value(dropped), strict=True)
        for worker, (taken, refused) in enumerate(counts):
            self._tally.add(f"worker-{worker}", int(taken + refused))
            self._dropped += int(refused)
        if self.stream:
            size = self.config.training.batch_size * self.batches_of_step()
            each = fetch_value(used).ravel() - fetch_value(numbers)
            self.position = self.position.advance((int(n) * size, size) for n in each)
        metrics = {**self.metrics(), "dropped_gradients": self._dropped}
        return Report(loss=float(fetch_value(loss)) / steps, metrics=metrics)

    def _create_staging(self, name: str) -> Staging:
        state = [*list_state(self.model), *(self.scale.variables if self.scale else ())]
        return Staging(
            [each.value for each in self.model.trainable_variables],
            state=[each.value for each in state],
            name=name,
        )

    def _loop_of_worker(self, problem: Problem) -> Callable[..., tf.Tensor]:
        compute_announced, turn = self._gradient_of_step(problem), self._turn()

        @tf.function(autograph=False)
        def loop(
            iterator: tf.data.Iterator,
            handle: tf.Tensor,
            loop_number: tf.Tensor,
            end: tf.Tensor,
            *lease: tf.Tensor,
        ) -> tf.Tensor:
            held = next(iterator) if lease else ()
            own, tokens = tf.stack([worker_number(), loop_number]), self._tokens[0].like(handle)

            def announce(step: tf.Tensor, *before: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                number = self._number(step)
                loss, sent, found = compute_announced(iterator, held, number, before, *lease)
                with tf.control_dependencies([self._announce(step, number, own, sent, found)]):
                    return self._later(tokens, step), loss

            def run_turn(step: tf.Tensor) -> tuple[tf.Tensor]:
                before: list[tf.Tensor] = []
                for _ in range(turn):
                    step, *before = announce(step, *before)
                return (step,)

            with tf.device(HUB):
                # Send `own` to the server only once, rather than with every announcement.
                own = tf.identity(own)
                # After a restart, the previous loop of this worker may have taken the token of the
                # open step, or may take the one put below. So do not wait for a token here.
                step = self._open.read_value()
                tokens.put(step)
            # Do not place these loops on `HUB`: a loop's condition is evaluated on its device.
            if turn > 1:
                (step,) = tf.while_loop(lambda step: step + (turn - 1) < end, run_turn, (step,))
            (step,) = tf.while_loop(
                lambda step: step < end, lambda each: announce(each)[:1], (step,)
            )
            with tf.device(HUB):
                # A slow worker's loop may have taken a token of the next loop, so put one back.
                tokens.put(step)
            return step

        return loop  # type: ignore[no-any-return]

    def _gradient_of_step(self, problem: Problem) -> Callable[..., Any]:
        """Return a function that returns the loss, a copy of it to announce, and the gradient."""
        whole = self.pulls_whole()
        # Use the full device name of a variable on `HUB`, because devices are compared by name.
        gradient = self.gradient(problem, loss_on=self.applied.device)

        def compute_announced(
            iterator: Any, held: Any, number: tf.Tensor, before: Any, *lease: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, list[Gradient]]:
            def compute() -> tuple[tf.Tensor, list[Gradient]]:
                # Wait for the previous step, so that only one batch of a turn is in memory.
                with tf.control_dependencies(before):
                    batch = self._take_input(iterator, held, number, *lease)
                # `number` exists only once its step is open, so read the variables after it.
                if whole:
                    # With `number` as an argument, only the reads on the servers wait for it.
                    return gradient(batch, [number])
                with tf.control_dependencies([number]):
                    return gradient(batch)

            # Keras updates state (moving averages, seeds) only in a replica context, and the
            # coordinator traces closures outside of one.
            loss, found = self.connected.run(compute)
            return loss, found.pop() if whole else loss, found

        return compute_announced

    def _turn(self) -> int:
        """Return the number of steps per loop iteration. 1 disables unrolling.

        Steps are unrolled only if each step needs all workers, because an unrolled loop cannot skip
        steps, and not with row lookups, because each step would trace the gradient again.
        """
        everyone = self._needed == self._workers and not self.stream
        long = self.config.training.steps >= LONG_RUN
        return TURN if everyone and long and self.pulls_whole() else 1

    def _number(self, step: tf.Tensor) -> tf.Tensor:
        """Return the number of the next gradient, once its step is open."""
        # This operation is atomic on the server, unlike an addition followed by a read.
        with tf.device(HUB), tf.control_dependencies([step]):
            return tf.raw_ops.ResourceCountUpTo(
                resource=self._numbers.handle, limit=tf.int64.max, T=tf.int64
            )

    def _take_input(self, iterator: Any, held: Any, number: tf.Tensor, *lease: tf.Tensor) -> Any:
        """Return the input of one step or, from a stream, the batches that belong to `number`."""
        stream = self.stream
        if not (stream and lease):
            return self.towers.take(iterator)
        plan, begin = lease
        size = self.config.training.batch_size
        first = (number - begin) * self.batches_of_step() * size

        def batch(of_step: int) -> Any:
            return stream.batch(held, plan, first + of_step * size, size)

        return self.towers.take(Batches(batch, self.config.training.accumulate))

    def _announce(
        self,
        step: tf.Tensor,
        number: tf.Tensor,
        own: tf.Tensor,
        loss: tf.Tensor,
        found: list[Gradient],
    ) -> tf.Operation:
        staged = self._staging.put(number, found)
        with tf.control_dependencies(staged), tf.device(HUB):
            return self._announced.put(tf.concat([[step, number], own], 0), loss)

    def _later(self, tokens: NamedQueue, step: tf.Tensor) -> tf.Tensor:
        """Wait for the token of a later step. Skip tokens of steps that are not open."""
        with tf.device(HUB):
            (token,) = tf.while_loop(
                lambda token: token < tf.maximum(step + 1, self._read_open(token)),
                lambda _: tokens.take(),
                tokens.take(),
            )
            return token

    def _read_open(self, after: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([after]):
            return self._open.read_value()

    def _updates_of_chief(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, ...]]:
        def update(index: Any, total: Any, accepted: Any, dropped: Any, used: Any) -> Any:
            loss, means, taken, refused, numbers = self._first(self._next_step())
            used = used.write(index, numbers)
            with tf.control_dependencies([loss]):
                self.optimizer.apply(means, self.model.trainable_variables)
            return index + 1, total + loss, accepted + taken, dropped + refused, used

        @tf.function(autograph=False)
        def updates(steps: tf.Tensor) -> tuple[tf.Tensor, ...]:
            with tf.device(HUB):
                steps, none = tf.identity(steps), tf.zeros([self._workers], tf.int64)
                used = tf.TensorArray(tf.int64, size=steps, element_shape=[self._needed])
                begin = (tf.constant(0), tf.constant(0.0), none, none, used)
                _, *sums, used = tf.while_loop(lambda index, *_: index < steps, update, begin)
                self._next_step()
                return *sums, used.stack()

        return updates  # type: ignore[no-any-return]

    def _next_step(self) -> tf.Tensor:
        """Open the step after all applied updates, and return its number."""
        step = self.applied.read_value()
        self._open.assign(step)
        for tokens in self._tokens:
            tokens.put(step)
        return step

    def _first(self, step: tf.Tensor) -> tuple[Any, ...]:
        """Take a step's first gradients. Return the means, used and dropped counts, and numbers."""
        taken = refused = given = tf.zeros([self._workers], tf.int64)
        losses, total, numbers = tf.constant(0.0), list[Gradient](), list[tf.Tensor]()
        for _ in range(self._needed):
            what, loss, stale = self._next(step, given)
            gradient = self._staging.take(what[NUMBER])
            numbers.append(what[NUMBER])
            total = list(map(add_gradients, total, gradient)) if total else gradient
            losses += loss
            taken += self._one_hot(what[WORKER])
            given += self._one_hot(what[LOOP])
            refused += stale
        means = [divide_gradient(each, self._needed) for each in total]
        return losses / self._needed, means, taken, refused, tf.stack(numbers)

    def _next(self, step: tf.Tensor, given: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the next announcement of an open step, its loss, and counts of dropped gradients.

        A restarted loop announces its step again. The second gradient is dropped.
        """

        def is_dropped(what: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            return tf.logical_or(what[STEP] < step, given[what[LOOP]] > 0)

        def drop(what: tf.Tensor, _: tf.Tensor, refused: tf.Tensor) -> tuple[tf.Tensor, ...]:
            self._staging.take(what[NUMBER])
            return *self._announced.take(), refused + self._one_hot(what[WORKER])

        none = tf.zeros([self._workers], tf.int64)
        found = tf.while_loop(is_dropped, drop, (*self._announced.take(), none))
        return tuple(found)

    def _one_hot(self, worker: tf.Tensor) -> tf.Tensor:
        return tf.one_hot(worker, self._workers, dtype=tf.int64)


class NamedQueue:
    """A first-in, first-out queue on a server, with a unique name.

    `tf.queue.FIFOQueue` ignores its name, so a later process would share the queue.
    """

    def __init__(
        self,
        dtypes: Sequence[tf.DType],
        shapes: Sequence[Sequence[int]],
        *,
        name: str = "",
        handle: tf.Tensor | None = None,
    ) -> None:
        """Create a queue on the current device, or wrap `handle`."""
        self._dtypes = list(dtypes)
        self._shapes = [list(shape) for shape in shapes]
        self.handle = handle
        if handle is None:
            self.handle = tf.raw_ops.FIFOQueueV2(
                component_types=self._dtypes, shapes=self._shapes, shared_name=name
            )

    def like(self, handle: tf.Tensor) -> NamedQueue:
        """Wrap the handle of another queue with the same dtypes and shapes."""
        return NamedQueue(self._dtypes, self._shapes, handle=handle)

    def put(self, *values: tf.Tensor) -> tf.Operation:
        """Enqueue one element."""
        return tf.raw_ops.QueueEnqueueV2(handle=self.handle, components=values)

    def take(self) -> list[tf.Tensor]:
        """Wait for an element, and dequeue it."""
        values = tf.raw_ops.QueueDequeueV2(handle=self.handle, component_types=self._dtypes)
        return [
            tf.ensure_shape(value, shape) for value, shape in zip(values, self._shapes, strict=True)
        ]

    def close(self) -> None:
        """Close the queue, so that all waits on it fail."""
        tf.raw_ops.QueueCloseV2(handle=self.handle, cancel_pending_enqueues=True)


class Staging:
    """A staging area for use in a `tf.function`: gradients wait on servers until they are taken.

    TensorFlow's keyed staging area holds the gradient of each variable on that variable's server.
    All parts of one gradient share a number. Gradients are added up only in an update, so an
    incomplete gradient of a killed worker never counts.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], *, name: str, state: Sequence[tf.Variable] = ()
    ) -> None:
        """Create the staging area. Its name must be unique across attempts of the chief.

        In a worker's graph, a gradient is staged only after the updates of `state`.
        """
        self._variables = variables
        self._name = name
        self._by_device: dict[str, list[int]] = {}
        for index, variable in enumerate(variables):
            self._by_device.setdefault(variable.device, []).append(index)
        self._state: dict[str, list[tf.Variable]] = {}
        for variable in state:
            self._state.setdefault(variable.device, []).append(variable)
        self._sparse: list[bool] = []

    def put(self, number: tf.Tensor, gradients: Sequence[Gradient]) -> list[tf.Operation]:
        """Send a gradient to the servers. The returned operations finish when it is staged."""
        self._sparse = [isinstance(each, tf.IndexedSlices) for each in gradients]
        changed = {device: self._wait_for_state(device) for device in self._state}
        sent = [each for device, each in changed.items() if device not in self._by_device]
        for device, indices in self._by_device.items():
            values = [part for i in indices for part in _parts(gradients[i])]
            # Wait for each device separately, because waiting for another server costs a message.
            before = [changed[device]] if device in changed else []
            with tf.device(device), tf.control_dependencies(before):
                sent.append(
                    tf.raw_ops.MapStage(
                        key=number,
                        indices=tf.range(len(values)),
                        values=values,
                        dtypes=[value.dtype for value in values],
                        shared_name=self._name,
                    )
                )
        return sent

    def _wait_for_state(self, device: str) -> tf.Operation:
        # A read in a graph waits for all earlier writes to the variable.
        with tf.device(device):
            return tf.group(*(each.read_value() for each in self._state[device]))

    def take(self, number: tf.Tensor) -> list[Gradient]:
        """Remove and return a staged gradient. `put` must be traced first."""
        gradients: list[Gradient] = [None] * len(self._variables)
        for device, indices in self._by_device.items():
            dtypes = [dtype for i in indices for dtype in self._dtypes(i)]
            with tf.device(device):
                values = tf.raw_ops.MapUnstage(
                    key=number, indices=tf.range(len(dtypes)), dtypes=dtypes, shared_name=self._name
                )
                parts = iter(values)
                for i in indices:
                    gradients[i] = self._whole(i, [next(parts) for _ in self._dtypes(i)])
        return gradients

    def _dtypes(self, index: int) -> list[tf.DType]:
        dtype = self._variables[index].dtype
        return [dtype, tf.int64] if self._sparse[index] else [dtype]

    def _whole(self, index: int, parts: list[tf.Tensor]) -> Gradient:
        shape = self._variables[index].shape
        if not self._sparse[index]:
            return tf.ensure_shape(parts[0], shape)
        values = tf.ensure_shape(parts[0], [None, *shape[1:]])
        rows = tf.ensure_shape(parts[1], [None])
        return tf.IndexedSlices(values, rows, tf.constant(shape.as_list(), tf.int64))


def _parts(gradient: Gradient) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, tf.cast(gradient.indices, tf.int64)]
    return [gradient]
