"""Runs one task of the published parameter-server program for MNIST, in TensorFlow 1 style.

The program uses between-graph replication with `feed_dict`: a 784-100-10 perceptron, Adam with a
learning rate of 0.01, batches of 100, and `SyncReplicasOptimizer` for synchronous updates. It
follows `mnist_replica.py` of TensorFlow 1 and `dist_mnist.py` from the examples of Kubeflow's
training operator. Measurements are kept in memory and rarely written, so that they do not slow it
down.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from benchmarks.baselines.mnist import Batches, training_examples
from flotilla.trainer.runtime import signals

PIXELS, HIDDEN, CLASSES = 784, 100, 10
BATCH, RATE = 100, 0.01
# Local steps between two readings of the clock, and between two writes of the measurements.
EVERY, WRITTEN_EVERY = 20, 100


def main() -> None:
    """Run one task: serve, or train to the last global step and write the measurements."""
    signals.end_with_parent()
    options = _options()
    tf.disable_v2_behavior()
    cluster = tf.train.ClusterSpec(
        {"ps": [options.ps], "worker": [f"localhost:{port}" for port in options.workers]}
    )
    server = tf.train.Server(cluster, job_name=options.job, task_index=options.index)
    if options.job == "ps":
        server.join()
    graph = _Graph(cluster, options)
    hooks = [tf.train.StopAtStepHook(last_step=options.steps), *graph.hooks]
    batches = Batches(*training_examples(), BATCH, seed=options.index)
    record = _Record(options)
    # Without the filter, a worker connects to the other workers and hangs if they have exited.
    own = tf.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{options.index}"])
    gate = _Gate(options)
    if options.index:
        # A worker that starts before the variables are initialized retries only after 30 seconds.
        gate.wait_for([0])
    with tf.train.MonitoredTrainingSession(
        master=server.target, is_chief=options.index == 0, hooks=hooks, config=own
    ) as session:
        gate.pass_together()
        while not session.should_stop():
            images, labels = batches.next()
            feed = {graph.images: images, graph.labels: labels}
            _, step = session.run([graph.train, graph.step], feed)
            if record.add(int(step)):
                record.keep(session.run(graph.weights))
    record.write()
    record.write_weights()


class _Graph:
    """The model and its update, with the variables on the parameter server."""

    def __init__(self, cluster: Any, options: argparse.Namespace) -> None:
        device = tf.train.replica_device_setter(
            worker_device=f"/job:worker/task:{options.index}", cluster=cluster
        )
        with tf.device(device):
            self.step = tf.train.get_or_create_global_step()
            self.images = tf.placeholder(tf.float32, [None, PIXELS])
            self.labels = tf.placeholder(tf.float32, [None, CLASSES])
            hidden = tf.nn.relu(_dense(self.images, PIXELS, HIDDEN, "hidden"))
            logits = _dense(hidden, HIDDEN, CLASSES, "logits")
            losses = tf.nn.softmax_cross_entropy_with_logits_v2(self.labels, logits)
            optimizer = tf.train.AdamOptimizer(RATE)
            self.hooks = []
            if options.sync:
                workers = len(options.workers)
                optimizer = tf.train.SyncReplicasOptimizer(
                    optimizer, replicas_to_aggregate=workers, total_num_replicas=workers
                )
                self.hooks = [optimizer.make_session_run_hook(options.index == 0)]
            self.weights = tf.trainable_variables()
            self.train = optimizer.minimize(tf.reduce_mean(losses), global_step=self.step)


def _dense(inputs: Any, given: int, units: int, name: str) -> Any:
    spread = tf.truncated_normal([given, units], stddev=1 / math.sqrt(given))
    kernel = tf.Variable(spread, name=f"{name}_kernel")
    return tf.nn.xw_plus_b(inputs, kernel, tf.Variable(tf.zeros([units]), name=f"{name}_bias"))


class _Gate:
    """Makes all workers start together, because the first one would otherwise take more steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._folder: Path = options.record.parent
        self._index: int = options.index
        self._all = range(len(options.workers))

    def pass_together(self) -> None:
        """Announce that this worker is ready, and wait for the others."""
        (self._folder / f"ready-{self._index}").touch()
        self.wait_for(self._all)

    def wait_for(self, workers: Iterable[int]) -> None:
        while not all((self._folder / f"ready-{each}").exists() for each in workers):
            time.sleep(0.005)


class _Record:
    """The measurements of one worker: the global step over time, and snapshots of the weights."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path = options.record
        self._snapshots = options.snapshots if options.index == 0 else 0
        self._local_steps = 0
        self._marks: list[tuple[float, int]] = []
        self._kept: list[tuple[float, int, list[Any]]] = []

    def add(self, step: int) -> bool:
        """Count a local step, and return whether a snapshot of the weights is due."""
        self._local_steps += 1
        if self._local_steps % EVERY == 1:
            self._marks.append((time.time(), step))
        if self._local_steps % WRITTEN_EVERY == 0:
            self.write()
        last = self._kept[-1][1] if self._kept else 0
        return bool(self._snapshots) and step >= last + self._snapshots

    def keep(self, weights: list[Any]) -> None:
        self._kept.append((time.time(), self._marks[-1][1], weights))

    def write(self) -> None:
        """Write the measurements so far, because some workers never reach the end."""
        result = {"local_steps": self._local_steps, "marks": self._marks}
        result["kept"] = [(when, step) for when, step, _ in self._kept]
        # Write to another file first, because the process may be killed at any moment.
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(result), encoding="utf-8")
        whole.replace(self._path)

    def write_weights(self) -> None:
        for number, (_, _, weights) in enumerate(self._kept):
            np.savez(self._path.with_name(f"weights-{number:04d}.npz"), *weights)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=["ps", "worker"], required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--ps", required=True)
    parser.add_argument("--workers", type=int, nargs="+", required=True, metavar="PORT")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument(
        "--snapshots", type=int, default=0, help="steps between two snapshots of the weights"
    )
    parser.add_argument("--record", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
