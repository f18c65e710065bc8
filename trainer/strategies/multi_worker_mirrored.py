"""Synchronous training without servers: every worker has the model, gradients are all-reduced.

Every worker runs the outer loop; worker 0 keeps the journal. The workers take the mean of their
gradients in a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters
of workstations") or by NCCL, and each applies it to its own copy. One worker that is gone stops all
of them: each begins again from the newest checkpoint.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import replace

import tensorflow as tf

from trainer.cluster import Task
from trainer.errors import ConfigError
from trainer.strategies.interface import Problem, Report
from trainer.strategies.replicated import Replicated
from trainer.strategies.tally import Tally


class MultiWorkerMirrored(Replicated):
    """Workers side by side, each with a copy of the model."""

    @property
    def publishes(self) -> bool:
        """Whether this is worker 0."""
        return self.task.index == 0

    def replicate(self) -> tf.distribute.Strategy:
        """Join the other workers, and wait for them."""
        communication = self.config.cluster.communication
        gpus = len(tf.config.list_physical_devices("GPU"))
        if communication == "nccl" and not gpus:
            raise ConfigError(
                f"cluster.communication: nccl needs a GPU, and {self.task} sees none; "
                "set it to ring or auto"
            )
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.cluster.spec()),
            task_type=self.task.role,
            task_id=self.task.index,
            rpc_layer="grpc",
            num_accelerators={"GPU": gpus},
        )
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation[
                communication.upper()
            ]
        )
        on_sigterm = signal.getsignal(signal.SIGTERM)
        strategy = tf.distribute.MultiWorkerMirroredStrategy(resolver, options)
        # TensorFlow has put a handler of its own in its place.
        signal.signal(signal.SIGTERM, on_sigterm)
        return strategy

    def build(self, problem: Problem) -> None:
        """Join the others, and make the copies of this worker."""
        super().build(problem)
        local_replicas = self.replicas.num_replicas_in_sync // self.cluster.count("worker")
        self._tally = Tally(batch_size=self.config.training.batch_size * local_replicas)

    def run(self, steps: int) -> Report:
        """Apply `steps` updates, each with a part of every worker."""
        report = super().run(steps)
        for index in range(self.cluster.count("worker")):
            self._tally.add(str(Task(role="worker", index=index)), steps)
        return replace(report, figures=self._tally.figures())

    def totals(self, problem: Problem) -> list[float]:
        """Return the sums over all workers, each of which measures a part on its own copy."""
        workers = self.cluster.count("worker")
        mine = self.measured_copy(problem).totals(self.variables(), self.task.index, workers)
        every = self._gathered(tf.constant(mine, tf.float64))
        return [float(value) for value in tf.reduce_sum(every, axis=0)]

    def agreed(self, *values: int) -> tuple[int, ...]:
        """Return the largest of each value over all workers."""
        every = self._gathered(tf.constant(values, tf.int64))
        return tuple(int(value) for value in tf.reduce_max(every, axis=0))

    def leave(self) -> None:
        """Go when all others know that the last checkpoint is published."""
        # Whoever hears the last answer first is gone before the others hear it.
        with suppress(tf.errors.OpError):
            self.agreed(0)

    @tf.function
    def _gathered(self, values: tf.Tensor) -> tf.Tensor:
        """Return the vectors of all workers, as rows."""

        def gathered() -> tf.Tensor:
            return tf.distribute.get_replica_context().all_gather(values[tf.newaxis], axis=0)

        return self.replicas.experimental_local_results(self.replicas.run(gathered))[0]
