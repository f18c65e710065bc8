"""Runs a chief with stub workers: `python -m benchmarks.stubs SPEC SECONDS`.

The strategy itself runs on TensorFlow's servers, but without a model: an update only increments a
counter on the parameter server. All messages between the processes are real. See
`benchmarks.handout`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime import signals
from flotilla.trainer.strategies.async_parameter_server import TURN, AsyncParameterServer
from flotilla.trainer.strategies.placement import server_device

# Warm-up time in seconds, in which every worker receives its first closures.
WARM_SECONDS = 3.0
# Number of stretches, and of checks of the workers, to average over.
STRETCHES, LOOKS = 3, 20


class Stubs(AsyncParameterServer):
    """A chief whose workers make empty updates."""

    def lead(self) -> None:
        """Connect, and create the counter and the datasets of the workers."""
        self.connect()
        with tf.device(server_device(0)):
            self.applied = tf.Variable(0, dtype=tf.int64, trainable=False)
        made = self.coordinator.create_per_worker_dataset(lambda: tf.data.Dataset.range(1).repeat())
        self._workers, self._iterator = self.cluster.count("worker"), iter(made)
        self.hand_out(self._update, TURN)

    def look(self) -> None:
        """Check the workers and report once, as the strategy does every second."""
        self._seen = self._turns.look()
        self._report()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the workers, because there is no model with metrics."""
        return self._tally.metrics()

    def _update(self, _iterator: object) -> tf.Tensor:
        with tf.device(server_device(0)):
            self.applied.assign_add(1, read_value=False)
        return tf.constant(1.0)


def lead(spec: dict[str, list[str]], seconds: float) -> dict[str, float]:
    """Train with all workers for `seconds`, and return the update rate and the chief's CPU time."""
    cluster = Cluster(addresses={role: tuple(addresses) for role, addresses in spec.items()})
    began, used = time.monotonic(), time.process_time()
    stubs = Stubs(parse_config({}), cluster, Task(role="chief", index=0))
    stubs.lead()
    connected, of_connecting = time.monotonic() - began, time.process_time() - used
    # The number of updates to dispatch until a speed is measured.
    steps = 4 * TURN * len(spec["worker"])
    boundary = 10**12
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + WARM_SECONDS:
        stubs.advance(steps, boundary)
    sent, of_sending = time.monotonic() - began, time.process_time() - used
    _say({})
    first = step = stubs.global_step()
    began, used = time.monotonic(), time.process_time()
    while (passed := time.monotonic() - began) < seconds:
        stubs.advance(max(steps, int(step / max(passed, 1))), boundary)
        step = stubs.global_step() - first
    found = {
        "updates_per_second": step / passed,
        "seconds": passed,
        "chief_cpu_per_second": (time.process_time() - used) / passed,
        "connecting_seconds": connected,
        "connecting_cpu_seconds": of_connecting,
        "stretch_seconds": sent,
        "stretch_cpu_seconds": of_sending,
    }
    _say(found)
    began, used = time.monotonic(), time.process_time()
    stubs.rest()
    found["rest_seconds"] = time.monotonic() - began
    found["rest_cpu_seconds"] = time.process_time() - used
    return {**found, **_of_one_worker(stubs, len(spec["worker"]))}


def _of_one_worker(stubs: Stubs, workers: int) -> dict[str, float]:
    used = time.process_time()
    for _ in range(STRETCHES):
        # Make enough updates for turns. All workers already have the closure of a turn.
        updates = 4 * TURN * workers
        stubs.advance(updates, stubs.global_step() + updates)
    of_stretches, used = time.process_time() - used, time.process_time()
    for _ in range(LOOKS):
        stubs.look()
    of_looks = time.process_time() - used
    return {
        "closure_cpu_seconds": of_stretches / STRETCHES / workers,
        "look_cpu_seconds": of_looks / LOOKS / workers,
    }


def _say(found: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print the result of `lead` as JSON. SPEC is a file with the addresses by role."""
    signals.end_with_parent()
    path, seconds = sys.argv[1:]
    found = lead(json.loads(Path(path).read_text(encoding="utf-8")), float(seconds))
    _say(found)
    # Exit at once, because threads of the coordinator still wait for workers.
    os._exit(0)


if __name__ == "__main__":
    main()
