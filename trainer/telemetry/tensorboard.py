"""TensorBoard files in the layout of Keras's callback, and the profile of a few steps.

    logs/RUN-ID/train/events.out.tfevents...        loss, learning_rate, steps_per_second, ...
    logs/RUN-ID/validation/events.out.tfevents...   loss and the metrics, by the same names
    logs/RUN-ID/callbacks/events.out.tfevents...    what the user's callbacks write
    logs/RUN-ID/events.out.tfevents...              the configuration, for the HParams page

Curves of the same name share a chart. The folders of several runs have different names, so that
they can be copied into one folder. `train` also gets the profile of the global steps that
`training.profile` names. The profiler traces this process, and requests a trace of the expected
duration from the TensorFlow servers of other tasks. Its errors do not stop training.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import api
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from flotilla.trainer.config.base import Section
from flotilla.trainer.config.schema import Config, TrainingConfig
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.strategies.strategy import Strategy

TRAIN, VALIDATION, CALLBACKS = "train", "validation", "callbacks"
_PREFIX = f"{VALIDATION}_"
# Keys that describe the environment of a run and do not affect training.
_LEFT_OUT = ("cluster.kubernetes", "storage.root")
# Minimum and maximum duration of the traces of other tasks, in milliseconds. The maximum limits
# memory use, because traces are kept in memory.
SHORTEST, LONGEST = 100, 10_000
# Maximum number of other tasks to trace. Each of them writes megabytes.
MOST_TASKS = 8
# Maximum time that training waits for the files of the other tasks, in seconds.
FILES_SECONDS = 30.0
log = logging.getLogger(__name__)


class EventFile:
    """A TensorBoard event file in the format of `tf.summary`'s writer."""

    _numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        """Create a new file, and its folder if necessary. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, so begin the name with the time.
        parts = f"{int(time.time()):010d}", socket.gethostname(), os.getpid(), next(self._numbers)
        self._path = folder / ".".join(map(str, ("events.out.tfevents", *parts)))
        self._append([tf.compat.v1.Event(wall_time=time.time(), file_version="brain.Event:2")])

    def append(self, step: int, summaries: Iterable[Any]) -> None:
        """Append TensorBoard's `Summary` messages at a global step. Raises `OSError`."""
        # Convert each message, because TensorBoard and TensorFlow have separate classes for it.
        contents = (summary.SerializeToString() for summary in summaries)
        self._append(
            tf.compat.v1.Event(
                wall_time=time.time(), step=step, summary=tf.compat.v1.Summary.FromString(content)
            )
            for content in contents
        )

    def _append(self, events: Iterable[Any]) -> None:
        with self._path.open("ab") as file:
            records = RecordWriter(file)
            for event in events:
                records.write(event.SerializeToString())


class TensorBoardLog:
    """A writer of one run's metrics for TensorBoard. Without a folder, it writes nothing."""

    def __init__(self, logs: Path | None, run_id: str) -> None:
        """Write to the run's folder below `logs`. The first row creates the files."""
        self.folder = logs / run_id if logs else None
        self._run_id = run_id
        self._is_broken = False
        self._files: dict[str, EventFile] = {}
        self._of_callbacks: Any = None

    def add(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of a history row at its global step."""
        step = int(row["global_step"])
        of_training = dict[str, float]()
        of_validation = dict[str, float]()
        for name, value in _scalars(row):
            if name.startswith(_PREFIX):
                of_validation[name.removeprefix(_PREFIX)] = value
            elif name != "global_step":
                of_training[name] = value
        self._write(TRAIN, step, list(itertools.starmap(scalar_pb, of_training.items())))
        self.add_validation(step, of_validation)

    def add_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a validation at a global step."""
        self._write(VALIDATION, step, list(itertools.starmap(scalar_pb, metrics.items())))

    def add_configuration(self, config: Config) -> None:
        """Write the keys of the configuration as hyperparameters of the run."""
        self._write("", 0, [api.hparams_pb(hyperparameters(config), trial_id=self._run_id)])

    def _write(self, name: str, step: int, summaries: Sequence[Any]) -> None:
        if not summaries or not self.folder or self._is_broken:
            return
        with self._stop_on_error():
            if name not in self._files:
                self._files[name] = EventFile(self.folder / name)
            self._files[name].append(step, summaries)

    @contextmanager
    def as_default(self, step: int) -> Iterator[None]:
        """Let `tf.summary` write to the callbacks' folder at a global step in this block."""
        if self.folder and not self._is_broken and self._of_callbacks is None:
            with self._stop_on_error():
                self._of_callbacks = tf.summary.create_file_writer(str(self.folder / CALLBACKS))
        if self._of_callbacks is None:
            yield
            return
        with self._of_callbacks.as_default(step=step):
            yield
        with self._stop_on_error():
            self._of_callbacks.flush()

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Stop writing after an error such as a full disk, which must not end the run."""
        try:
            yield
        except (OSError, tf.errors.OpError) as error:
            text = str(error).partition("\n")[0]
            log.warning("no longer writing metrics for TensorBoard: %s", text)
            self._is_broken = True
            self._files.clear()
            self._of_callbacks = None


def hyperparameters(config: Config) -> dict[str, bool | int | float | str]:
    """Return the keys that affect training, with their values. Lists and mappings are JSON."""
    return dict(_leaves(config, ""))


def _leaves(section: Section, path: str) -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in section:
        key = f"{path}{name}"
        if key in _LEFT_OUT:
            continue
        if isinstance(value, Section):
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, bool | int | float | str):
            yield key, value
        else:
            yield key, json.dumps(value, default=Section.model_dump)


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row. A number in a mapping is named `outer/inner`."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


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
