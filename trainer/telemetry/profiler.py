"""The profile of a few global steps, as set by `training.profile`.

The profiler traces this process from the first to the last of these steps. It also requests a trace
of the expected duration from the TensorFlow servers of other tasks. Errors in the profiler do not
stop training.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.strategies.strategy import Strategy
from flotilla.trainer.telemetry.scalars import TRAIN

# Minimum and maximum duration of the traces of other tasks, in milliseconds. The maximum limits
# memory use, because traces are kept in memory.
SHORTEST, LONGEST = 100, 10_000
# Maximum number of other tasks to trace. Each of them writes megabytes.
MOST_TASKS = 8
# Maximum time that training waits for the files of the other tasks, in seconds.
FILES_SECONDS = 30.0
log = logging.getLogger(__name__)


class Profiler:
    """A profiler that traces a range of steps, once per attempt."""

    def __init__(self, steps: tuple[int, ...], folder: Path | None, servers: list[str]) -> None:
        """Trace `steps` (first and last, or none) into `folder`. `servers` are `grpc://` URLs."""
        self._first, self._last = steps or (0, 0)
        # Use the folder of the training curves, as Keras does.
        self._folder = folder / TRAIN if folder and steps else None
        self._servers = servers
        self._is_tracing = False
        self._others: threading.Thread | None = None

    def update(self, step: int, steps_per_second: float = 0.0) -> None:
        """Start or stop the trace after `step`, so that it covers the configured range of steps."""
        if not self._folder:
            return
        if self._is_tracing and step >= self._last:
            self.end()
        elif not self._is_tracing and self._first <= step + 1 <= self._last:
            self._begin(self._folder, step, steps_per_second)

    def end(self) -> None:
        """Stop a running trace, and write its files."""
        if not self._is_tracing:
            return
        self._is_tracing = False
        self._try("write the profile", tf.profiler.experimental.stop)
        if self._others:
            self._others.join(FILES_SECONDS)

    def _begin(self, folder: Path, step: int, steps_per_second: float) -> None:
        self._is_tracing = self._try(
            "start the profiler", lambda: tf.profiler.experimental.start(str(folder))
        )
        if not self._is_tracing:
            self._folder = None
        elif self._servers:
            seconds = (self._last - step) / steps_per_second if steps_per_second else 1.0
            milliseconds = int(min(max(1000 * seconds, SHORTEST), LONGEST))
            self._others = threading.Thread(
                target=self._trace_others, args=(folder, milliseconds), name="profile", daemon=True
            )
            self._others.start()

    def _trace_others(self, folder: Path, milliseconds: int) -> None:
        self._try(
            "profile the other tasks",
            lambda: tf.profiler.experimental.client.trace(
                ",".join(self._servers), str(folder), milliseconds, num_tracing_attempts=1
            ),
        )

    def _try(self, what: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except (tf.errors.OpError, RuntimeError, OSError) as error:
            log.warning("cannot %s: %s", what, str(error).splitlines()[0])
            return False
        return True


def make_profiler(training: TrainingConfig, strategy: Strategy, folder: Path | None) -> Profiler:
    """Return a profiler. It traces only if this task is the one that publishes checkpoints."""
    steps = training.profile if strategy.publishes else ()
    return Profiler(steps, folder, list_servers(strategy.cluster, strategy.task))


def list_servers(cluster: Cluster, this: Task) -> list[str]:
    """Return the addresses of the other tasks to trace, workers before parameter servers."""
    tasks = [
        Task(role=role, index=index)
        for role in ("worker", "ps")
        for index in range(cluster.count(role))
    ]
    others = [cluster.address(task) for task in tasks if task != this]
    return [f"grpc://{address}" for address in others[:MOST_TASKS]]
