"""Asynchronous training on parameter servers.

Every worker pulls the variables, computes a gradient and pushes it, without waiting for the others;
the parameter server applies each as it comes (Dean et al. 2012, "Large Scale Distributed Deep
Networks", section 4.1). The chief only dispatches: TensorFlow's `ClusterCoordinator` sends closures
of several steps to whichever worker is free, and sends a closure again when its worker dies.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from trainer.strategies.interface import Batch, Problem, Report
from trainer.strategies.pulled import local_steps_of
from trainer.strategies.served import Served
from trainer.strategies.tally import Tally, worker_name

# 145 steps/s with one step a closure, 314 with 20, 503 with 100 (two workers on two cores).
STEPS_PER_CLOSURE = 50


class AsyncParameterServer(Served):
    """One chief, parameter servers, and workers that never wait for each other."""

    spares_workers = True

    def build(self, problem: Problem) -> None:
        """Connect, place model and optimizer on the parameter servers, input on the workers."""
        self.connect()
        self.build_model(problem)
        self._tally = Tally(batch_size=self.config.training.batch_size)
        self._iterator = self.worker_batches(problem)
        self._closure = self._steps(problem)

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, spread over the workers as they are free."""
        size = max(1, min(STEPS_PER_CLOSURE, steps // self.cluster.count("worker")))
        sizes = [size] * (steps // size) + ([steps % size] if steps % size else [])
        ended = self.dispatch(self._closure, [(self._iterator, tf.constant(n)) for n in sizes])
        local_steps = self.config.training.pull_every
        total = 0.0
        for n, (loss, worker, applied) in zip(sizes, ended, strict=True):
            total += float(loss)
            # A worker pulls right after it has pushed: between the two stand the others' updates.
            staleness = (int(applied) - n) / n
            self._tally.add(worker.decode(), n * local_steps, staleness=staleness)
        return Report(loss=total / steps, figures=self._tally.figures())

    def _steps(self, problem: Problem) -> Callable[..., tuple[tf.Tensor, ...]]:
        update = self._local_steps(problem) if self._pulls_seldom() else self._step(problem)
        applied = self.applied

        @tf.function
        def closure(iterator: tf.data.Iterator, steps: tf.Tensor) -> tuple[tf.Tensor, ...]:
            total = tf.constant(0.0)
            before = applied.read_value()
            for _ in tf.range(steps):
                total += update(iterator)
            return total, worker_name(), applied.read_value() - before

        return closure  # type: ignore[no-any-return]

    def _pulls_seldom(self) -> bool:
        return self.config.training.pull_every > 1

    def _step(self, problem: Problem) -> Callable[[tf.data.Iterator], tf.Tensor]:
        gradient = self.gradient(problem)

        def step(batch: Batch) -> tf.Tensor:
            value, found = gradient(batch)
            self.optimizer.apply(found, self.model.trainable_variables)
            return value

        # The coordinator traces in the scope of its strategy, where Keras updates a variable in a
        # replica's context only.
        return lambda iterator: self.connected.run(step, args=(next(iterator),))

    def _local_steps(self, problem: Problem) -> Callable[[tf.data.Iterator], tf.Tensor]:
        training = self.config.training
        steps = local_steps_of(
            self.model,
            self.optimizer,
            problem.loss,
            steps=training.pull_every,
            jit=training.jit_compile,
        )
        return lambda iterator: self.connected.run(steps, args=(iterator,))
