"""The base of all parameter server strategies, and the simplest of them, in-graph replication.

`Served` connects to the cluster, places variables, dispatches work and reports metrics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.config.topology import Task, find_topology
from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.embeddings import row_updates as touched_rows
from flotilla.trainer.embeddings.batch_rows import Lookups, Unforeseen, find_lookups
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.gradients import (
    build_pulled_gradient,
    build_rows_gradient,
    list_towers,
    mean,
)
from flotilla.trainer.strategies.input_position import Tally, encode_plan
from flotilla.trainer.strategies.placement import (
    KeptValues,
    build_placed_model,
    build_slots,
    choose_places,
    fetch_value,
    optimize_once,
    server_device,
)
from flotilla.trainer.strategies.server_state import STEP, MisfitError, ServerState, is_lost
from flotilla.trainer.strategies.strategy import (
    Batch,
    KerasStrategy,
    Problem,
    Report,
    Sums,
    build_gradient,
    exact_counter,
)

log = logging.getLogger(__name__)

# The file with the number of the worker, in the worker's working directory.
NUMBER_FILE = "number.txt"
Call = tuple[Callable[..., Any], tuple[Any, ...]]


@tf.autograph.experimental.do_not_convert
def worker_number() -> tf.Tensor:
    """Return the number of the worker that runs this graph, as an int64 scalar."""
    return tf.strings.to_number(tf.io.read_file(NUMBER_FILE), tf.int64)


def looks_up(model: keras.Model) -> bool:
    """Return whether any layer reads or updates only parts of its variables on the servers."""
    kinds = (keras.layers.Embedding, keras.layers.SpectralNormalization)
    return any(
        isinstance(layer, kinds) or getattr(layer, "looks_up", False)
        for layer in model._flatten_layers()
    )


class Served(KerasStrategy):
    """A strategy whose chief schedules work on workers, with variables on parameter servers."""

    io_device = "/job:chief/task:0"
    #: The lookups of the model, if workers pull rows and no table does its own lookup.
    lookups: Lookups | None = None
    #: The state that servers keep for the next attempt, if the strategy supports it.
    state: ServerState | None = None
    _tally: Tally
    _part: Callable[[tf.Tensor], tf.Tensor] | None = None

    def build(self, problem: Problem) -> None:
        """Connect, and build the model, optimizer and input. Reuse values on the servers."""
        self.connect()
        try:
            self.build_on_servers(problem)
            return
        except MisfitError:
            pass
        # If no server was lost, remove the state, or the next attempt would fail in the same way.
        except Exception as error:
            if not (self.state and self.state.taken) or is_lost(error):
                raise
            self.state.remove(
                f"the model cannot be built with them: {user_code.short_message(error)}"
            )
        self.build_on_servers(problem)

    def build_on_servers(self, problem: Problem) -> None:
        """Build the model and the input. Call `keep` before tracing. Raises `MisfitError`."""
        raise NotImplementedError

    def find_state(self, uri: str) -> ServerState | None:
        """Connect, and return the state that an earlier attempt left on the servers, if any."""
        if self.capabilities.keeps_values:
            self.connect()
            self.state = ServerState(uri, self.cluster.count("ps"))
        return self.state

    def connect(self) -> None:
        """Connect to all tasks and wait for their replies, unless already connected."""
        if hasattr(self, "connected"):
            return
        self.connected = self._create_strategy()
        optimize_once()
        self.towers = list_towers([each.name for each in tf.config.list_logical_devices()])
        # By default, TensorFlow runs a step, with a push, on each GPU of a worker, and fails at the
        # first update of a variable. With this limit, a worker is one replica.
        self.connected.extended._num_gpus_per_worker = min(
            1, self.connected.extended._num_gpus_per_worker
        )
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.connected)

    def _create_strategy(self) -> tf.distribute.ParameterServerStrategy:
        try:
            return tf.distribute.ParameterServerStrategy(self.resolver())
        except ValueError:
            # If workers have different numbers of GPUs, raise an error that names the workers.
            list_towers([each.name for each in tf.config.list_logical_devices()])
            raise

    def build_model(self, problem: Problem, *, gradients: int = 1) -> None:
        """Build the model and the optimizer. An update is the mean of `gradients` gradients."""
        servers, named = self.cluster.count("ps"), self.config.cluster.placement
        self._kept = KeptValues(self.state.taken if self.state else ())
        places = choose_places(problem.build_model, problem.check, servers, named)
        with _server_lost():
            self.model = build_placed_model(problem.build_model, places, self._kept)
            with tf.device(server_device(0)):
                self.optimizer = self.make_optimizer(problem)
                self.scale = self.make_scale(gradients=gradients)
            build_slots(self.optimizer, self.model, self._kept)
        training = self.config.training
        whole = training.pull_every > 1 or self.pulls_whole()
        touched_rows.use(self.optimizer, self.model, training, pulled=whole)
        self.lookups = None if whole else find_lookups(self.model)
        self.applied = exact_counter(self.optimizer)
        embedding_table.connect(self.model, self.optimizer, self.applied)

    def keep(self, others: Mapping[str, tf.Variable]) -> None:
        """Name the variables on the servers, and reuse the values of an earlier attempt.

        `others` are the strategy's own variables on the servers. Raises `MisfitError` if the
        servers hold variables that do not match.
        """
        if not self.state:
            return
        parts = embedding_table.list_shards(self.model)
        unsaved = {
            f"{index}/{number}": each
            for index, part in enumerate(parts)
            for number, each in enumerate(part.unsaved)
        }
        saved = dict(self.variables())
        variables = {STEP: saved[STEP], **saved, **unsaved, **others}
        # Include `training.freeze`: it decides to which variable a slot of the same path belongs.
        training = self.config.training
        placement = dict(self.config.cluster.placement)
        described = [training.optimizer.name, list(training.freeze), placement]
        self.state.take(variables, parts, described, saved)
        # Initialize skipped variables without a name, such as some that Keras does not track.
        self._kept.give_others(variables.values())

    def settle(self, *, is_whole: bool) -> None:
        """Record whether the values on the servers are complete, so that they can be reused."""
        if self.state:
            self.state.settle(is_whole=is_whole)

    def refresh(self) -> None:
        """Rebuild the indexes of restored tables only: workers may be adding rows to others."""
        taken = self.state.is_taken if self.state else lambda _device: False
        embedding_table.restore_tables(self.model, lambda device: not taken(device))

    def tally(self) -> Tally:
        """Return a new tally of local steps. A step has one batch for each device of a worker."""
        return Tally(batch_size=self.config.training.step_examples * len(self.towers))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the workers and of the dynamic tables for the history."""
        return {**self._tally.metrics(), **embedding_table.metrics(self.model)}

    def batches_of_step(self) -> int:
        """Return the number of batches in one gradient of a worker."""
        return self.config.training.accumulate * len(self.towers)

    def gradient(
        self, problem: Problem, *, loss_on: str = ""
    ) -> Callable[..., tuple[tf.Tensor, list[Any]]]:
        """Return a function from the input of one step to the loss and the gradients.

        If `pulls_whole` returns true, the function first pulls all variables, in one message per
        server and dtype. Otherwise, lookups pull only the rows of the batch. For `loss_on`, see
        `build_pulled_gradient`.
        """
        training, whole = self.config.training, self.pulls_whole()
        if not whole and training.accumulate == 1 and not self.scale:
            return self._build_sparse(problem)
        return build_pulled_gradient(
            self.model,
            problem.loss,
            jit=training.jit_compile,
            parts=training.accumulate,
            scale=self.scale,
            in_place=not whole,
            towers=self.towers,
            loss_on=loss_on,
        )

    def _build_sparse(self, problem: Problem) -> Callable[[Any], tuple[tf.Tensor, list[Any]]]:
        directly: Callable[[Any], tuple[tf.Tensor, list[Any]]]
        directly = self.towers.gradient(build_gradient(self.model, problem.loss))
        if not self.lookups or len(self.towers) > 1:
            return directly

        def otherwise(batch: Batch, why: Unforeseen) -> tuple[tf.Tensor, list[Any]]:
            log.info("looking up each table separately, because the model %s", why)
            value, found = directly(batch)
            return value, found

        return build_rows_gradient(self.model, problem.loss, self.lookups, otherwise=otherwise)

    def pulls_whole(self) -> bool:
        """Return whether a worker pulls all rows of every variable before it computes."""
        return self.config.training.jit_compile or not looks_up(self.model)

    def worker_batches(self, problem: Problem) -> Any:
        """Return per-worker iterators over batches or, with a stream, over the stored examples."""
        stream = self.stream

        @tf.autograph.experimental.do_not_convert
        def dataset(_: object = None) -> tf.data.Dataset:
            return stream.held().cache().repeat() if stream else self.batches(problem)

        return iter(self.coordinator.create_per_worker_dataset(dataset))

    def lease(self, batches: int) -> tuple[tf.Tensor, ...]:
        """Return arguments for `lend`, so that each run of a closure gets the same examples."""
        first = batches * self.config.training.batch_size
        return encode_plan(self.position), tf.constant(first, tf.int64)

    def lend(self, iterator: Any, batches: tf.Tensor, plan: tf.Tensor, first: tf.Tensor) -> Any:
        """Return an iterator over `batches` leased batches. `plan` and `first` are from `lease`."""
        if not self.stream:
            raise AssertionError("lend needs a stream of examples")
        size = self.config.training.batch_size
        found = self.stream.lend(next(iterator), plan, first, batches=batches, size=size)
        with tf.device("/device:CPU:0"):
            return iter(self.stack(found).prefetch(2))

    def dispatch(self, calls: Sequence[Call]) -> list[Any]:
        """Run each call on a free worker, repeat it if the worker dies, and return all results."""
        ended = [self.coordinator.schedule(closure, args=args) for closure, args in calls]
        self.coordinator.join()
        return [value.fetch() for value in ended]

    def totals(self, problem: Problem) -> Sums:
        """Return the sums over all parts. If a worker dies, another one computes its part."""
        workers = self.cluster.count("worker")
        if self._part is None:

            @tf.function
            def part(number: tf.Tensor) -> tf.Tensor:
                # Enter a replica context, because the coordinator traces closures outside of one.
                return self.connected.run(
                    lambda index: problem.totals(self.model, index, workers), args=(number,)
                )

            self._part = part
        parts = self.dispatch([(self._part, (tf.constant(n),)) for n in range(workers)])
        sums: Sums = np.sum(parts, axis=0)
        return sums


@contextmanager
def _server_lost() -> Iterator[None]:
    """If the cause of a `ConfigError` is a lost server, raise the cause instead."""
    try:
        yield
    except ConfigError as error:
        if isinstance(error.__cause__, Exception) and is_lost(error.__cause__):
            raise error.__cause__ from None
        raise


class InGraph(Served):
    """Training by a chief that builds a tower for every worker in one function.

    All towers read the same variables. Each update applies the mean of all gradients, so it waits
    for the slowest worker.
    """

    capabilities = find_topology("in_graph").capabilities

    def build_on_servers(self, problem: Problem) -> None:
        """Build the model on the servers, and the input of each worker on that worker."""
        self._workers = range(self.cluster.count("worker"))
        self.build_model(problem, gradients=len(self._workers))
        self.keep({})
        self._tally = self.tally()
        self._iterators = [self._batches(worker, problem) for worker in self._workers]
        self._run_steps = self._steps(problem)

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, each the mean of one gradient from every worker."""
        total = self._run_steps(self._iterators, tf.constant(steps))
        self.advance_position(steps * len(self._workers) * self.batches_of_step())
        for index in self._workers:
            self._tally.add(str(Task(role="worker", index=index)), steps)
        return Report(loss=float(fetch_value(total)) / steps, metrics=self.metrics())

    def _batches(self, worker: int, problem: Problem) -> Any:
        with tf.device(f"{_device(worker)}/device:CPU:0"):
            return iter(self.batches(problem, worker, len(self._workers)))

    def _steps(self, problem: Problem) -> Callable[..., tf.Tensor]:
        gradient = tf.autograph.experimental.do_not_convert(self.gradient(problem))
        variables = self.model.trainable_variables

        @tf.function
        def run_steps(iterators: list[Any], steps: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0)
            for _ in tf.range(steps):
                towers = []
                for worker, iterator in zip(self._workers, iterators, strict=True):
                    with tf.device(_device(worker)):
                        towers.append(gradient(self.towers.take(iterator)))
                losses = [loss for loss, _ in towers]
                found = zip(variables, *(g for _, g in towers), strict=True)
                means = [_mean(each, of=variable.value) for variable, *each in found]
                self.optimizer.apply(means, variables)
                total += tf.add_n(losses) / len(losses)
            return total

        return run_steps  # type: ignore[no-any-return]


def _device(worker: int) -> str:
    return f"/job:worker/task:{worker}"


def _mean(gradients: list[Any], of: tf.Variable) -> tf.Tensor:
    with tf.device(of.device):
        return mean(gradients)


class LoopWatch:
    """A thread that ends the chief's wait if a loop on a worker fails."""

    def __init__(
        self, coordinator: tf.distribute.coordinator.ClusterCoordinator, stop: Callable[[], Any]
    ) -> None:
        """Start the thread, which calls `stop` once a loop has failed."""
        self.error: Exception | None = None
        self._coordinator = coordinator
        self._stop = stop
        self._begun = threading.Event()
        threading.Thread(target=self._wait, name="workers", daemon=True).start()

    def begin(self) -> None:
        """Start watching. Call it after the loops are scheduled."""
        self._begun.set()

    def _wait(self) -> None:
        while self.error is None:
            self._begun.wait()
            self._begun.clear()
            try:
                self._coordinator.join()
            # A loop runs the user's model, which may raise any exception.
            except Exception as error:
                self.error = error
        with suppress(tf.errors.OpError):
            self._stop()
