"""Copies of one model that move together: on the GPUs of a process, or in processes side by side.

Every replica computes the gradient of a batch of its own; the mean over all replicas is applied to
each copy, so that the copies stay equal. What is not moved by gradients is kept together here:

- moving averages (BatchNorm) are averaged over the replicas after each stretch of steps, which
  gives what averaging them at every step would give, since they are linear in what they take in;
- seeds (Dropout) are set apart before the first step, so that no two replicas drop the same units.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.fused import fuse
from trainer.strategies.interface import (
    Batch,
    Problem,
    Report,
    Strategy,
    checkpoint_variables,
    exact_counter,
    gradient_of,
)

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_SEED = "seed_generator_state"


class Replicated(Strategy):
    """Model and optimizer in the scope of a `tf.distribute` strategy of replicas in step."""

    @abstractmethod
    def replicate(self) -> tf.distribute.Strategy:
        """Return TensorFlow's strategy; nothing of TensorFlow has run in this process before."""

    def build(self, problem: Problem) -> None:
        """Make a copy of model and optimizer on each replica, and the input of this process."""
        self.replicas = self.replicate()
        with self.replicas.scope():
            self.model = problem.build_model()
            self.optimizer = problem.build_optimizer()
            self.optimizer.build(self.model.trainable_variables)
        # Copies on several devices are no variables that a kernel could move.
        if self.replicas is tf.distribute.get_strategy():
            fuse(self.optimizer)
        self._applied = exact_counter(self.optimizer)
        # It would sum gradients that are a mean already, and clip them before.
        self.optimizer._all_reduce_sum_gradients = list
        self._iterator = self._batches(problem)
        self._steps_of = self._steps(problem)
        self._apart = False

    def run(self, steps: int) -> Report:
        """Apply `steps` updates."""
        if not self._apart:
            # Not in `build`: a checkpoint that is restored after it has the seeds of one replica.
            self._set_seeds_apart()
            self._apart = True
        return Report(loss=float(self._steps_of(self._iterator, tf.constant(steps))) / steps)

    def global_step(self) -> int:
        """Return the optimizer's counter."""
        return int(self._applied.numpy())

    def variables(self) -> Mapping[str, tf.Variable]:
        """Return the variables; what is read of one is the first copy in this process."""
        return checkpoint_variables(self.model, self.optimizer)

    def learning_rate(self) -> float:
        """Return what the optimizer would use now."""
        return float(tf.convert_to_tensor(self.optimizer.learning_rate))

    def _batches(self, problem: Problem) -> Any:
        def endless(_: object) -> tf.data.Dataset:
            # TensorFlow asks all replicas before each step who still has a batch, unless it knows.
            without_end = tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)
            return problem.batches().apply(without_end)

        return iter(self.replicas.distribute_datasets_from_function(endless))

    def _steps(self, problem: Problem) -> Callable[..., tf.Tensor]:
        replicas = self.replicas
        loss = _of_one_replica(problem.loss, replicas.num_replicas_in_sync)
        gradient = gradient_of(self.model, loss, jit=self.config.training.jit_compile)

        def step(batch: Batch) -> tf.Tensor:
            value, gradients = gradient(batch)
            value, *gradients = _mean([value, *gradients])
            self.optimizer.apply(gradients, self.model.trainable_variables)
            return value

        def average() -> None:
            moving = [
                variable.value
                for variable in self.model.non_trainable_variables
                if variable.value.dtype.is_floating
            ]
            means = _mean([variable.read_value() for variable in moving]) if moving else []
            for variable, mean in zip(moving, means, strict=True):
                variable.assign(mean)

        @tf.function
        def steps_of(iterator: tf.data.Iterator, steps: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0)
            for _ in tf.range(steps):
                losses = replicas.run(step, args=(next(iterator),))
                total += replicas.experimental_local_results(losses)[0]
            replicas.run(average)
            return total

        return steps_of  # type: ignore[no-any-return]

    def _set_seeds_apart(self) -> None:
        seeds = [v.value for v in self.model.variables if v.path.endswith(_SEED)]

        @tf.function
        def shift() -> None:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            for seed in seeds:
                seed.assign_add(tf.cast([number, 0], seed.dtype))

        self.replicas.run(shift)


def _of_one_replica(loss: Loss, replicas: int) -> Loss:
    """Take back that Keras divides a mean by the number of replicas, for a sum over them."""
    if not isinstance(loss, keras.losses.Loss) or loss.reduction in ("sum", "none", None):
        return loss
    return lambda labels, logits: loss(labels, logits) * replicas


def _mean(values: list[Any]) -> list[Any]:
    """Return the mean of each value over all replicas; rows that were looked up stay sparse."""
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return values
    means: list[Any] = replica.all_reduce(tf.distribute.ReduceOp.MEAN, values)
    return means
