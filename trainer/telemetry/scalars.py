"""TensorBoard files in the layout of Keras's callback: `train` and `validation`.

    logs/RUN-ID/train/events.out.tfevents...        loss, learning_rate, steps_per_second, ...
    logs/RUN-ID/validation/events.out.tfevents...   loss and the metrics, by the same names
    logs/RUN-ID/callbacks/events.out.tfevents...    what the user's callbacks write
    logs/RUN-ID/events.out.tfevents...              the configuration, for the HParams page

Curves of the same name share a chart. The folders of several runs have different names, so that
they can be copied into one folder.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import api
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from flotilla.trainer.config.base import Section
from flotilla.trainer.config.schema import Config

TRAIN, VALIDATION, CALLBACKS = "train", "validation", "callbacks"
_PREFIX = f"{VALIDATION}_"
# Keys that describe the environment of a run and do not affect training.
_LEFT_OUT = ("cluster.kubernetes", "storage.root")
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
