"""One process without a cluster; mirrored over its GPUs when there are several.

The plainest strategy: what every other one is measured and checked against.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from trainer.strategies.interface import (
    Problem,
    Report,
    Strategy,
    checkpoint_variables,
    exact_counter,
    step_of,
)


class Single(Strategy):
    """Model, input and updates in this process."""

    def build(self, problem: Problem) -> None:
        """Make model, optimizer and input on the devices of this process."""
        gpus = tf.config.list_logical_devices("GPU")
        self._strategy = (
            tf.distribute.MirroredStrategy() if len(gpus) > 1 else tf.distribute.get_strategy()
        )
        with self._strategy.scope():
            self._model = problem.build_model()
            self._optimizer = problem.build_optimizer()
            self._optimizer.build(self._model.trainable_variables)
        self._applied = exact_counter(self._optimizer)
        batches = self._strategy.distribute_datasets_from_function(lambda _: problem.batches())
        self._iterator = iter(batches)
        step = step_of(self._model, self._optimizer, problem.loss)
        strategy = self._strategy

        @tf.function
        def steps_of(iterator: tf.data.Iterator, steps: tf.Tensor) -> tf.Tensor:
            total = tf.constant(0.0)
            for _ in tf.range(steps):
                losses = strategy.run(step, args=(next(iterator),))
                total += strategy.reduce(tf.distribute.ReduceOp.MEAN, losses, axis=None)
            return total

        self._steps_of = steps_of

    def run(self, steps: int) -> Report:
        """Apply `steps` updates."""
        return Report(loss=float(self._steps_of(self._iterator, tf.constant(steps))) / steps)

    def global_step(self) -> int:
        """Return the optimizer's counter."""
        return int(self._applied.numpy())

    def variables(self) -> Mapping[str, tf.Variable]:
        """Return the variables of this process."""
        return checkpoint_variables(self._model, self._optimizer)

    def learning_rate(self) -> float:
        """Return what the optimizer would use now."""
        return float(self._optimizer.learning_rate)
