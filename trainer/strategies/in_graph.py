"""In-graph replication: one client builds a tower for every worker in one function.

All towers read the same variables. Each update applies the mean of all gradients, so it waits for
the slowest worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from flotilla.trainer.config.topology import Task, find_topology
from flotilla.trainer.strategies.parameter_server import Served
from flotilla.trainer.strategies.placement import fetch_value
from flotilla.trainer.strategies.strategy import Problem, Report
from flotilla.trainer.strategies.towers import mean


class InGraph(Served):
    """Training by a chief whose graph spans all workers, with variables on parameter servers."""

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
