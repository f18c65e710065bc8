"""What all strategies with parameter servers share: connection, variables, dispatch and metrics."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.embeddings import row_updates as touched_rows
from flotilla.trainer.embeddings import table_state
from flotilla.trainer.embeddings.batch_rows import Lookups, Unforeseen, find_lookups
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.gradients import pulled_gradient_of, rows_gradient_of
from flotilla.trainer.strategies.input_position import Tally, encode_plan
from flotilla.trainer.strategies.placement import (
    KeptValues,
    build_at,
    build_slots,
    choose_places,
    optimize_once,
    server_device,
)
from flotilla.trainer.strategies.server_state import STEP, MisfitError, ServerState, is_lost
from flotilla.trainer.strategies.strategy import (
    Batch,
    KerasStrategy,
    Problem,
    Sums,
    exact_counter,
    gradient_of,
)
from flotilla.trainer.strategies.towers import list_towers

log = logging.getLogger(__name__)

# In the working folder of every worker.
NUMBER_FILE = "number.txt"
# A closure and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


@tf.autograph.experimental.do_not_convert
def worker_number() -> tf.Tensor:
    """Return the number of the worker that runs this graph, as a scalar int64."""
    return tf.strings.to_number(tf.io.read_file(NUMBER_FILE), tf.int64)


def looks_up(model: keras.Model) -> bool:
    """Say whether a layer looks up, or changes, its variables where they are on the servers."""
    kinds = (keras.layers.Embedding, keras.layers.SpectralNormalization)
    return any(
        isinstance(layer, kinds) or getattr(layer, "looks_up", False)
        for layer in model._flatten_layers()
    )


class Served(KerasStrategy):
    """A chief that leads workers, with the variables on parameter servers."""

    io_device = "/job:chief/task:0"
    #: Where all rows of a batch are known before the model is computed.
    lookups: Lookups | None = None
    #: What servers keep of the run for the next attempt, where anything is kept.
    state: ServerState | None = None
    _tally: Tally
    _part: Callable[[tf.Tensor], tf.Tensor] | None = None

    def build(self, problem: Problem) -> None:
        """Connect, and build model, optimizer and input, for what is on the servers if it fits."""
        self.connect()
        try:
            self.build_on_servers(problem)
            return
        except MisfitError:
            pass
        # Whatever it is, it must not come again and again: a large weight has no values yet.
        except Exception as error:
            if not (self.state and self.state.taken) or is_lost(error):
                raise
            self.state.remove(f"the model cannot be built for it: {user_code.short_message(error)}")
        self.build_on_servers(problem)

    def build_on_servers(self, problem: Problem) -> None:
        """Build all there is, and `keep` it before anything is traced; raises `MisfitError`."""
        raise NotImplementedError

    def find_state(self, uri: str) -> ServerState | None:
        """Connect, and look for what an attempt before has left."""
        if self.capabilities.keeps_values:
            self.connect()
            self.state = ServerState(uri, self.cluster.count("ps"))
        return self.state

    def connect(self) -> None:
        """Connect to all tasks and wait until they answer; a second call does nothing."""
        if hasattr(self, "connected"):
            return
        self.connected = self._connected()
        optimize_once()
        self.towers = list_towers([each.name for each in tf.config.list_logical_devices()])
        # TensorFlow would run a step once for each GPU, with a push of its own, and fails at the
        # first update of a variable. To it a worker is one replica, on its first device.
        self.connected.extended._num_gpus_per_worker = min(
            1, self.connected.extended._num_gpus_per_worker
        )
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.connected)

    def _connected(self) -> tf.distribute.ParameterServerStrategy:
        try:
            return tf.distribute.ParameterServerStrategy(self.resolver())
        except ValueError:
            # Workers with different numbers of GPUs, of which TensorFlow names none.
            list_towers([each.name for each in tf.config.list_logical_devices()])
            raise

    def build_model(self, problem: Problem, *, gradients: int = 1) -> None:
        """Build model, optimizer and counter; `gradients` of them make an update."""
        servers, named = self.cluster.count("ps"), self.config.cluster.placement
        self._kept = KeptValues(self.state.taken if self.state else ())
        places = choose_places(problem.build_model, problem.check, servers, named)
        with _server_lost():
            self.model = build_at(problem.build_model, places, self._kept)
            with tf.device(server_device(0)):
                self.optimizer = self.make_optimizer(problem)
                self.scale = self.make_scale(gradients=gradients)
            build_slots(self.optimizer, self.model, self._kept)
        training = self.config.training
        whole = training.pull_every > 1 or self.pulls_whole()
        touched_rows.use(self.optimizer, self.model, training, pulled=whole)
        self.lookups = None if whole else find_lookups(self.model)
        self.applied = exact_counter(self.optimizer)
        table_state.connect(self.model, self.optimizer, self.applied)

    def keep(self, others: Mapping[str, tf.Variable]) -> None:
        """Give what is on the servers names, and take the values that are there by them.

        `others` are what a strategy has there besides. Raises `MisfitError` where other variables
        are there.
        """
        if not self.state:
            return
        parts = table_state.list_shards(self.model)
        unsaved = {
            f"{index}/{number}": each
            for index, part in enumerate(parts)
            for number, each in enumerate(part.unsaved)
        }
        saved = dict(self.variables())
        variables = {STEP: saved[STEP], **saved, **unsaved, **others}
        # With other variables frozen a slot of the same path may be that of another one.
        training = self.config.training
        placement = dict(self.config.cluster.placement)
        described = [training.optimizer.name, list(training.freeze), placement]
        self.state.take(variables, parts, described, saved)
        # What the model function has made, and Keras does not know of.
        self._kept.give_others(variables.values())

    def settle(self, *, is_whole: bool) -> None:
        """Say whether the variables have values that the next attempt may go on from."""
        if self.state:
            self.state.settle(is_whole=is_whole)

    def restored(self) -> None:
        """Let tables find their rows, but for those that were taken: workers may add some."""
        taken = self.state.is_taken if self.state else lambda _device: False
        table_state.restore_tables(self.model, lambda device: not taken(device))

    def tally(self) -> Tally:
        """Return a tally of local steps, each with a batch for every device of a worker."""
        return Tally(batch_size=self.config.training.step_examples * len(self.towers))

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the workers, and of tables that grow, for the history."""
        return {**self._tally.metrics(), **table_state.metrics(self.model)}

    def batches_of_step(self) -> int:
        """Return how many batches a worker takes for one gradient."""
        return self.config.training.accumulate * len(self.towers)

    def gradient(
        self, problem: Problem, *, loss_on: str = ""
    ) -> Callable[..., tuple[tf.Tensor, list[Any]]]:
        """Return the function from what the towers take to loss and gradient.

        All variables are pulled before, in one message a server, unless a layer looks up rows: then
        only the rows of a batch. For `loss_on` see `pulled_gradient_of`.
        """
        training, whole = self.config.training, self.pulls_whole()
        if not whole and training.accumulate == 1 and not self.scale:
            return self._of_rows(problem)
        return pulled_gradient_of(
            self.model,
            problem.loss,
            jit=training.jit_compile,
            parts=training.accumulate,
            scale=self.scale,
            in_place=not whole,
            towers=self.towers,
            loss_on=loss_on,
        )

    def _of_rows(self, problem: Problem) -> Callable[[Any], tuple[tf.Tensor, list[Any]]]:
        """Return the function with the rows of a batch in one message, where they can be."""
        directly: Callable[[Any], tuple[tf.Tensor, list[Any]]]
        directly = self.towers.gradient(gradient_of(self.model, problem.loss))
        if not self.lookups or len(self.towers) > 1:
            return directly

        def otherwise(batch: Batch, why: Unforeseen) -> tuple[tf.Tensor, list[Any]]:
            log.info("each table is looked up separately, since the model %s", why)
            value, found = directly(batch)
            return value, found

        return rows_gradient_of(self.model, problem.loss, self.lookups, otherwise=otherwise)

    def pulls_whole(self) -> bool:
        """Say whether a worker pulls all variables before it computes."""
        return self.config.training.jit_compile or not looks_up(self.model)

    def worker_batches(self, problem: Problem) -> Any:
        """Return an iterator of whichever worker uses it: of batches, or of all that it holds."""
        if self.stream:
            held = self.stream.held
            made = self.coordinator.create_per_worker_dataset(
                tf.autograph.experimental.do_not_convert(lambda _=None: held().cache().repeat())
            )
        else:
            made = self.coordinator.create_per_worker_dataset(
                tf.autograph.experimental.do_not_convert(lambda _=None: self.batches(problem))
            )
        return iter(made)

    def lease(self, batches: int) -> tuple[tf.Tensor, ...]:
        """Return the arguments that lend a closure the same examples at each of its runs."""
        first = batches * self.config.training.batch_size
        return encode_plan(self.position), tf.constant(first, tf.int64)

    def lent(self, iterator: Any, batches: tf.Tensor, plan: tf.Tensor, first: tf.Tensor) -> Any:
        """Return an iterator over a number of batches, of which a lease has the first."""
        if not self.stream:
            raise AssertionError("nothing is lent without a stream")
        size = self.config.training.batch_size
        found = self.stream.lent(next(iterator), plan, first, batches=batches, size=size)
        with tf.device("/device:CPU:0"):
            return iter(self.stacked(found).prefetch(2))

    def dispatch(self, calls: Sequence[Call]) -> list[Any]:
        """Run each call once, on whichever worker is free; return the results."""
        ended = [self.coordinator.schedule(closure, args=args) for closure, args in calls]
        self.coordinator.join()
        return [value.fetch() for value in ended]

    def totals(self, problem: Problem) -> Sums:
        """Return the sums over all parts, one for each worker; that of a dead worker moves."""
        workers = self.cluster.count("worker")
        if self._part is None:

            @tf.function
            def part(number: tf.Tensor) -> tf.Tensor:
                # The coordinator traces in the scope of its strategy; see the callers of
                # `gradient`.
                return self.connected.run(
                    lambda index: problem.totals(self.model, index, workers), args=(number,)
                )

            self._part = part
        parts = self.dispatch([(self._part, (tf.constant(n),)) for n in range(workers)])
        sums: Sums = np.sum(parts, axis=0)
        return sums


@contextmanager
def _server_lost() -> Iterator[None]:
    """Raise that a server is gone in the place of what is said of the code that found it gone."""
    try:
        yield
    except ConfigError as error:
        if isinstance(error.__cause__, Exception) and is_lost(error.__cause__):
            raise error.__cause__ from None
        raise


class LoopWatch:
    """Waits on a thread for an error in the workers' loops, so that the chief's wait ends too."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        stop: Callable[[], Any],
    ) -> None:
        """Call `stop` where a loop has failed."""
        self.error: Exception | None = None
        self._coordinator = coordinator
        self._stop = stop
        self._begun = threading.Event()
        threading.Thread(target=self._wait, name="workers", daemon=True).start()

    def begin(self) -> None:
        """Loops have been scheduled."""
        self._begun.set()

    def _wait(self) -> None:
        while self.error is None:
            self._begun.wait()
            self._begun.clear()
            try:
                self._coordinator.join()
            # A loop runs the user's model, and may fail in any way.
            except Exception as error:
                self.error = error
        with suppress(tf.errors.OpError):
            self._stop()
