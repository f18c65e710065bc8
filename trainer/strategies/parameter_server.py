"""What all strategies with parameter servers share: connection, variables, dispatch and metrics.

`Served` is their base class: a chief that leads workers, with model, optimizer and counter on the
parameter servers. `LoopWatch` sees the errors of loops that nobody waits for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import user_code
from trainer.strategies import table_state
from trainer.strategies.gradients import pulled_gradient_of, rows_gradient_of
from trainer.strategies.left_graphs import CONFIGURED
from trainer.strategies.left_variables import STEP, LeftVariables
from trainer.strategies.placement import (
    Place,
    build_at,
    build_slots,
    is_of_keras,
    made_here,
    moved,
    optimize_once,
    places_of,
    server_device,
)
from trainer.strategies.remade import Remade, connect_again, is_lost
from trainer.strategies.strategy import (
    Batch,
    KerasStrategy,
    Problem,
    Sums,
    exact_counter,
    gradient_of,
)
from trainer.strategies.towers import towers_of
from trainer.strategies.updates import touched_rows
from trainer.strategies.updates.batch_rows import Lookups, Unforeseen, lookups_of
from trainer.strategies.updates.touched_rows import RowGroup
from trainer.strategies.visits import Tally, plan_of

log = logging.getLogger(__name__)

# Workers that are there have their graphs ready by then.
READY_SECONDS = 20.0
# In the working folder of every worker.
NUMBER_FILE = "number.txt"
# A closure and its arguments.
Call = tuple[Callable[..., Any], tuple[Any, ...]]


@tf.autograph.experimental.do_not_convert
def worker_number() -> tf.Tensor:
    """Return the number of the worker that runs this graph, as a scalar int64."""
    return tf.strings.to_number(tf.io.read_file(NUMBER_FILE), tf.int64)


def looks_up(model: keras.Model) -> bool:
    """Say whether a layer has to use its variables on the servers, and not pulled copies.

    That is one that looks up rows of a table (Keras's embedding, or a layer with `looks_up`), and
    one that changes trainable variables in its forward pass.
    """
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
    #: Of which a snapshot copies the rows that have changed; empty without snapshots.
    row_groups: Sequence[RowGroup] = ()
    #: Whether it goes on with servers that were started again: see `rejoin`.
    rejoins = False
    #: Whether the next chief may go on with the variables that this one leaves on the servers.
    leaves_variables = False
    #: What is there of the run, where that is so.
    left: LeftVariables | None = None
    #: Where the variables of the model are, and those that are not there yet.
    _places: Sequence[Place] = ()
    _made_here: Sequence[tf.Variable] = ()
    _tally: Tally
    _configured: Sequence[tuple[tf.Variable, Any]] = ()
    _part: Callable[[tf.Tensor], tf.Tensor] | None = None
    #: Variables that have names on the servers, by what they are.
    _outlive: Mapping[str, tf.Variable] = MappingProxyType({})

    def connect(self) -> None:
        """Connect to all tasks and wait until they answer.

        TensorFlow's strategy only gives the cluster to the coordinator. Its round-robin placement
        of variables is not used: they are placed by size. A second call does nothing.
        """
        if hasattr(self, "connected"):
            return
        self.connected = self._connected()
        optimize_once()
        self.towers = towers_of([each.name for each in tf.config.list_logical_devices()])
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
            towers_of([each.name for each in tf.config.list_logical_devices()])
            raise

    def build_model(self, problem: Problem, *, gradients: int = 1) -> None:
        """Build model, optimizer and the exact counter of updates on the parameter servers.

        `gradients` is how many of them make an update.
        """
        if self.left and self.left.places:
            self._build_for_left(problem, gradients, self.left)
        else:
            servers, named = self.cluster.count("ps"), self.config.cluster.placement
            self._places = places_of(problem.build_model, problem.check, servers, named)
            self.model, self._made_here = build_at(problem.build_model, self._places), []
            self._make_updates(problem, gradients)
            build_slots(self.optimizer, self.model)
        training = self.config.training
        whole = training.pull_every > 1 or self.pulls_whole()
        touched_rows.use(self.optimizer, self.model, training, pulled=whole)
        self.lookups = None if whole else lookups_of(self.model)
        self.applied = exact_counter(self.optimizer)
        table_state.connect(self.model, self.optimizer, self.applied)
        saved = {id(each) for each in self.variables().values()}
        # What a configuration says, and no checkpoint: the learning rate.
        self._configured = [
            (each.value, each.numpy())
            for each in self.optimizer.variables
            if id(each.value) not in saved
        ]
        if self.config.cluster.snapshot_seconds:
            self.row_groups = touched_rows.row_groups(
                self.model, self.optimizer, training, pulled=whole
            )

    def _build_for_left(self, problem: Problem, gradients: int, left: LeftVariables) -> None:
        self._places = [Place("", server) for server in left.places]
        try:
            with made_here() as self._made_here:
                self.model = build_at(problem.build_model, self._places)
            self._make_updates(problem, gradients)
            # One of the user's may change its slots when it has made them.
            there = nullcontext[list[tf.Variable]]([])
            with made_here() if is_of_keras(self.optimizer) else there as slots:
                build_slots(self.optimizer, self.model)
            self._made_here = [*self._made_here, *slots]
        # Whatever it is, it must not come again and again: what is left has to be removed.
        except Exception as error:
            if is_lost(error):
                raise
            left.refuse(f"the model cannot be built for it: {user_code.message_of(error)}")

    def _make_updates(self, problem: Problem, gradients: int) -> None:
        with tf.device(server_device(0)):
            self.optimizer = self.make_optimizer(problem)
            self.scale = self.make_scale(gradients=gradients)

    def take_left(self, others: Mapping[str, tf.Variable]) -> bool:
        """Give what is on the servers names, and return whether it was left by an earlier chief.

        `others` are what a strategy has there besides model and optimizer.

        Raises:
            MisfitError: what is left is of other variables; all has to be built again.
        """
        if not self.left:
            return False
        parts = table_state.parts_of(self.model)
        unsaved = {
            f"{index}/{number}": each
            for index, part in enumerate(parts)
            for number, each in enumerate(part.unsaved)
        }
        marks = {
            f"marks/{index}": group.marks
            for index, group in enumerate(self.row_groups)
            if group.marks is not None
        }
        saved = dict(self.variables())
        variables = {STEP: saved.pop(STEP), **saved, **unsaved, **marks, **others}
        # With other variables frozen a slot of the same path may be that of another one.
        training = self.config.training
        placement = dict(self.config.cluster.placement)
        described = [training.optimizer.name, list(training.freeze), placement]
        held = {id(each) for each in variables.values()}
        for each in self._made_here:
            # The model function has made it, and does not use it.
            if id(each) not in held:
                moved(each)
        self._outlive = variables
        places = [place.server for place in self._places]
        is_left = self.left.take(variables, parts, described, places)
        for each in marks.values():
            # Of this chief's snapshots all rows are new.
            each.assign(tf.ones(each.shape, tf.bool))
        return is_left

    def handles(self) -> dict[str, tf.Tensor]:
        """Return the handles of what each chief of a run has on the servers, by what they are."""
        parts = table_state.parts_of(self.model)
        return {
            **{name: each.handle for name, each in self._outlive.items()},
            **({"permit": self.left.permit.handle} if self.left else {}),
            **{f"{CONFIGURED}{n}": each.handle for n, (each, _) in enumerate(self._configured)},
            **{f"map/{n}": each.map for n, each in enumerate(parts)},
            **{f"mutex/{n}": each.mutex for n, each in enumerate(parts)},
        }

    def settle(self, *, is_whole: bool) -> None:
        """Say whether the variables have values that the next chief may go on from."""
        if self.left:
            self.left.settle(is_whole=is_whole)

    def restored(self) -> None:
        """Let tables find their rows, unless they do, and workers that go on may add some."""
        if not (self.left and self.left.is_taken):
            super().restored()

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

        All variables are pulled before, those of each server in one message, unless a layer looks
        up rows: then only the rows of a batch are transferred. For `loss_on` see
        `pulled_gradient_of`.
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
            log.info("each table is looked up by itself, as the model %s", why)
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
        """Return the arguments that lend a closure what comes so many batches after the position.

        A closure that runs again, as its worker died, has the same examples.
        """
        first = batches * self.config.training.batch_size
        return plan_of(self.position), tf.constant(first, tf.int64)

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

    def halt(self) -> None:
        """Wait until no worker runs anything; an error of the coordinator has cancelled it."""
        # What the functions of the workers end with does not matter any more.
        with suppress(Exception):
            self.coordinator.join()

    def rejoin(
        self,
        lost: Collection[int],
        others: Callable[[Remade], None],
        assign: Callable[[], None],
    ) -> None:
        """Go on with servers that were started again, without a new attempt.

        To be called when nothing runs on the cluster (`halt`), and the servers answer. `others`
        makes what others had there; `assign` gives variables of a checkpoint their values.

        Raises:
            OpError: of TensorFlow, where a task is gone meanwhile.
        """
        connect_again(self.coordinator)
        remade = Remade(lost, self.left.names if self.left else {})
        if self.left:
            self.left.remake(remade)
        for each in self.variables().values():
            remade.variable(each)
        for variable, value in self._configured:
            if remade.variable(variable):
                variable.assign(value)
        for group in self.row_groups:
            if group.marks is not None:
                remade.variable(group.marks, tf.ones)
        table_state.remake(self.model, remade)
        self.remake(remade)
        others(remade)
        remade.rebind()
        remade.require_reached(self.cluster.count("worker"))
        self.prepare()
        assign()
        table_state.restored_on(self.model, remade)
        self.settle(is_whole=True)
        self.wait_until_ready()

    def wait_until_ready(self) -> bool:
        """Wait for what workers were sent, and return whether it has ended; it may do so later."""
        return bool(self.coordinator._cluster.closure_queue.wait(READY_SECONDS))

    def remake(self, remade: Remade) -> None:
        """Make again what a strategy has on servers besides model and optimizer."""

    def prepare(self) -> None:
        """Have workers get the graphs of their steps ready, without a step."""

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


class LoopWatch:
    """Waits for an error in the workers' loops, on a thread.

    The chief itself waits for what the loops give. When one has failed for good, this wait has to
    end too.
    """

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
