"""Synchronous training on replicas: copies of one model with equal variables.

Every replica computes the gradient of a different batch and applies the mean over all replicas, so
the copies stay equal. This module handles the state that gradients do not change:

- Moving averages (BatchNorm) are averaged over the replicas after each inner loop. Averaging at
  every step would give the same result, because a moving average is linear.
- Seeds (Dropout) are shifted before the first step, so that no two replicas drop the same units.

`Single` runs one replica on each GPU of its process, or one on the CPU. It is the reference for the
other strategies.

`MultiWorkerMirrored` runs one replica in each worker, or one on each GPU of a worker. The workers
all-reduce their gradients in a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms for clusters of workstations") or by NCCL. Every worker runs the outer loop. Worker 0
writes the journal. If a worker is lost, all workers restart from the newest checkpoint.
"""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer.config.topology import Task, find_topology
from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.embeddings import row_updates as touched_rows
from flotilla.trainer.embeddings.embedding_table import SEED
from flotilla.trainer.optimizers.optimizers import fuse
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.gradients import build_pulled_gradient
from flotilla.trainer.strategies.input_position import Tally
from flotilla.trainer.strategies.placement import is_of_keras
from flotilla.trainer.strategies.strategy import (
    Batch,
    KerasStrategy,
    Problem,
    Report,
    Sums,
    build_gradient,
    build_own_step,
    exact_counter,
    has_own_step,
)

Gradient = Callable[[Batch], tuple[tf.Tensor, list[Any]]]


class Replicated(KerasStrategy):
    """A strategy that builds the model in the scope of a `tf.distribute` strategy."""

    @abstractmethod
    def replicate(self) -> tf.distribute.Strategy:
        """Return TensorFlow's strategy. Call it before any other TensorFlow operation."""

    def build(self, problem: Problem) -> None:
        """Build the model and the optimizer on each replica, and the input of this process."""
        self.replicas = self.replicate()
        with self.replicas.scope():
            self.model = problem.build_model()
            problem.check(self.model)
            self.optimizer = self.make_optimizer(problem)
            # Each replica can have its own loss scale, because the gradient does not depend on it.
            self.scale = self.make_scale(
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            self.optimizer.build(self.model.trainable_variables)
        # The fused kernels cannot update a variable with copies on several devices.
        if self.replicas is tf.distribute.get_strategy():
            fuse(self.optimizer)
        own = has_own_step(self.model)
        summed = own and self.replicas.num_replicas_in_sync > 1
        touched_rows.use(self.optimizer, self.model, self.config.training, summed=summed)
        self.applied = exact_counter(self.optimizer)
        embedding_table.connect(self.model, self.optimizer, self.applied)
        if not own:
            # The gradients are already means, so Keras must not sum them over the replicas.
            self.optimizer._all_reduce_sum_gradients = list
        self._iterator = self._batches(problem)
        self._run_steps = self._steps(problem)
        self._has_own_seeds = False

    def run(self, steps: int) -> Report:
        """Apply `steps` updates."""
        if not self._has_own_seeds:
            # Separate the seeds only now, because a restored checkpoint makes them equal again.
            self._separate_seeds()
            self._has_own_seeds = True
        loss = float(self._run_steps(self._iterator, tf.constant(steps))) / steps
        parts = self.config.training.accumulate
        self.advance_position(steps * self.replicas.num_replicas_in_sync * parts)
        return Report(loss=loss, metrics=embedding_table.metrics(self.model))

    def _batches(self, problem: Problem) -> Any:
        def endless(_: object) -> tf.data.Dataset:
            # Declare the dataset infinite. Otherwise, TensorFlow asks all replicas before each step
            # whether a batch is left.
            without_end = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            of = max(1, self.cluster.count("worker"))
            return self.batches(problem, self.task.index, of).apply(without_end)

        return iter(self.replicas.distribute_datasets_from_function(endless))

    def _steps(self, problem: Problem) -> Callable[..., tf.Tensor]:
        replicas = self.replicas
        step = tf.autograph.experimental.do_not_convert(self._step(problem))

        @tf.autograph.experimental.do_not_convert
        def average() -> None:
            moving = [
                variable.value
                for variable in self.model.non_trainable_variables
                # Skip variables that were frozen after their creation: they are equal on all
                # replicas.
                if variable.value.dtype.is_floating and not variable.value.trainable
            ]
            means = _mean([variable.read_value() for variable in moving]) if moving else []
            for variable, mean in zip(moving, means, strict=True):
                variable.assign(mean)

        @tf.function
        def run_steps(iterator: tf.data.Iterator, steps: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0)
            for _ in tf.range(steps):
                losses = replicas.run(step, args=(next(iterator),))
                total += replicas.experimental_local_results(losses)[0]
            replicas.run(average)
            return total

        return run_steps  # type: ignore[no-any-return]

    def _step(self, problem: Problem) -> Callable[[Batch], tf.Tensor]:
        """Return the update of a replica: a function from its batch to the mean loss."""
        if has_own_step(self.model):
            with self.replicas.scope():
                own = build_own_step(self.model, self.optimizer, problem.weighed)
            return lambda batch: _mean([own(batch)])[0]
        jit = self.config.training.jit_compile
        alone = self.replicas is tf.distribute.get_strategy()
        if jit and alone and _is_of_keras(self.optimizer, self.model):
            return self._compile_update(self._gradient(problem, jit=False))
        return self._update(self._gradient(problem, jit=jit))

    def _update(self, gradient: Gradient) -> Callable[[Batch], tf.Tensor]:
        def update(batch: Batch) -> tf.Tensor:
            value, gradients = gradient(batch)
            value, *gradients = _mean([value, *gradients])
            self.optimizer.apply(gradients, self.model.trainable_variables)
            return value

        return update

    def _compile_update(self, gradient: Gradient) -> Callable[[Batch], tf.Tensor]:
        """Return an update compiled by XLA. A sparse gradient is applied without XLA."""
        compiled_gradient = tf.function(gradient, jit_compile=True, autograph=False)
        update = self._update(compiled_gradient)
        compiled_update = tf.function(update, jit_compile=True, autograph=False)

        def step(batch: Batch) -> tf.Tensor:
            _, found = compiled_gradient.get_concrete_function(batch).structured_outputs
            # Do not compile sparse updates, because XLA lacks kernels for some optimizers.
            moves_rows = any(isinstance(each, tf.IndexedSlices) for each in found)
            return (update if moves_rows else compiled_update)(batch)

        return step

    def _gradient(self, problem: Problem, *, jit: bool) -> Gradient:
        training = self.config.training
        if training.accumulate == 1 and not self.scale:
            return build_gradient(self.model, problem.loss, jit=jit)
        return build_pulled_gradient(
            self.model,
            problem.loss,
            jit=jit,
            parts=training.accumulate,
            scale=self.scale,
            in_place=True,
        )

    def _separate_seeds(self) -> None:
        seeds = [v.value for v in self.model.variables if v.path.endswith(SEED)]

        @tf.function(autograph=False)
        def shift() -> None:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            for seed in seeds:
                seed.assign_add(tf.cast([number, 0], seed.dtype))

        self.replicas.run(shift)


def _is_of_keras(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> bool:
    """Return whether an update runs no user code, so that XLA can compile it."""
    constraints = [variable.constraint for variable in model.trainable_variables]
    parts = [optimizer, optimizer._learning_rate, *constraints]
    return all(is_of_keras(each) for each in parts if each is not None)


def _mean(values: list[Any]) -> list[Any]:
    """Return the mean of each value over all replicas.

    A sparse gradient becomes dense if its number of rows may differ between replicas.
    """
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return values
    whole = [
        tf.convert_to_tensor(each)
        if isinstance(each, tf.IndexedSlices) and each.values.shape[0] is None
        else each
        for each in values
    ]
    means: list[Any] = replica.all_reduce(tf.distribute.ReduceOp.MEAN, whole)
    return means


class Single(Replicated):
    """Training in one process, with one replica on each of its GPUs."""

    capabilities = find_topology("single").capabilities

    def replicate(self) -> tf.distribute.Strategy:
        """Return a strategy over all GPUs, or the default strategy if there are fewer than two."""
        gpus = tf.config.list_logical_devices("GPU")
        return tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()


class MultiWorkerMirrored(Replicated):
    """Training with a copy of the model in each worker."""

    capabilities = find_topology("multi_worker_mirrored").capabilities

    @property
    def publishes(self) -> bool:
        """Whether this is worker 0."""
        return self.task.index == 0

    def replicate(self) -> tf.distribute.Strategy:
        """Connect to the other workers, and wait for them."""
        communication = self.config.cluster.communication
        gpus = len(tf.config.list_physical_devices("GPU"))
        if communication == "nccl" and not gpus:
            raise ConfigError(
                f"cluster.communication: nccl needs a GPU, but {self.task} has none; "
                "use ring or auto"
            )
        implementations = tf.distribute.experimental.CommunicationImplementation
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=implementations[communication.upper()]
        )
        on_sigterm = signal.getsignal(signal.SIGTERM)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(self.resolver(GPU=gpus), options)
        # Restore the SIGTERM handler, because TensorFlow replaced it.
        signal.signal(signal.SIGTERM, on_sigterm)
        return strategy

    def build(self, problem: Problem) -> None:
        """Connect to the other workers, and build the replicas of this worker."""
        super().build(problem)
        local_replicas = self.replicas.num_replicas_in_sync // self.cluster.count("worker")
        self._tally = Tally(batch_size=self.config.training.step_examples * local_replicas)

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, each with a gradient from every worker."""
        report = super().run(steps)
        for index in range(self.cluster.count("worker")):
            self._tally.add(str(Task(role="worker", index=index)), steps)
        return replace(report, metrics=self._tally.metrics())

    def totals(self, problem: Problem) -> Sums:
        """Return the sums over all workers. Each worker evaluates one part with its own copy."""
        workers = self.cluster.count("worker")
        mine = self.measured_copy(problem).totals(self.variables(), self.task.index, workers)
        sums: Sums = tf.reduce_sum(self._gather(tf.constant(mine)), axis=0).numpy()
        return sums

    def barrier(self, *values: int) -> tuple[int, ...]:
        """Wait for all workers, and return the maximum of each value over the workers."""
        every = self._gather(tf.constant(values or (0,), tf.int64))
        largest = [int(value) for value in tf.reduce_max(every, axis=0)]
        return tuple(largest[: len(values)])

    def leave(self) -> None:
        """Wait until all other workers know that the last checkpoint is published."""
        # Ignore an error: the first worker that passes the barrier may exit while others wait.
        with suppress(tf.errors.OpError):
            self.barrier()

    @tf.function
    def _gather(self, values: tf.Tensor) -> tf.Tensor:
        """Return a matrix with one row for each worker: the vector `values` of that worker."""

        def gather() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_gather(values[tf.newaxis], axis=0)

        return self.replicas.experimental_local_results(self.replicas.run(gather))[0]
