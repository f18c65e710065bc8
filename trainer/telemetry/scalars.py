"""TensorBoard files in the layout of Keras's callback: `train` and `validation`.

    logs/RUN-ID/train/events.out.tfevents...        loss, learning_rate, steps_per_second, ...
    logs/RUN-ID/validation/events.out.tfevents...   loss and the metrics, by the same names
    logs/RUN-ID/events.out.tfevents...              the configuration, for the HParams page

Curves of the same name share a chart. The folders of several runs have different names, so that
they can be copied into one folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import api

from flotilla.trainer.config.base import Section
from flotilla.trainer.config.schema import Config

TRAIN, VALIDATION = "train", "validation"
_PREFIX = f"{VALIDATION}_"
# Keys that describe the environment of a run and do not affect training.
_LEFT_OUT = ("cluster.kubernetes", "storage.root")
log = logging.getLogger(__name__)


class TensorBoardLog:
    """Writes the metrics of one run for TensorBoard. Without a folder, it writes nothing."""

    def __init__(self, logs: Path | None, run_id: str) -> None:
        """Write to the run's folder below `logs`. The first row creates the files."""
        self.folder = logs / run_id if logs else None
        self._run_id = run_id
        self._is_broken = False
        self._writers: dict[str, Any] = {}

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
        self._write(TRAIN, step, of_training)
        self.add_validation(step, of_validation)

    def add_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a validation at a global step."""
        self._write(VALIDATION, step, metrics)

    def add_configuration(self, config: Config) -> None:
        """Write the keys of the configuration as hyperparameters of the run."""
        if not self.folder or self._is_broken:
            return
        with (
            self._stop_on_error(),
            tf.summary.create_file_writer(str(self.folder)).as_default(),
        ):
            api.hparams(hyperparameters(config), trial_id=self._run_id)

    def _write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        if not values or not self.folder or self._is_broken:
            return
        with self._stop_on_error():
            writer = self._open(name)
            with writer.as_default(step=step):
                for tag, value in values.items():
                    tf.summary.scalar(tag, value)
            writer.flush()

    @contextmanager
    def as_default(self, step: int) -> Iterator[None]:
        """Let `tf.summary` write to the training folder at a global step in this block."""
        writer = None
        if self.folder and not self._is_broken:
            with self._stop_on_error():
                writer = self._open(TRAIN)
        if writer is None:
            yield
            return
        with writer.as_default(step=step):
            yield
        with self._stop_on_error():
            writer.flush()

    def _open(self, name: str) -> Any:
        if name not in self._writers:
            self._writers[name] = tf.summary.create_file_writer(f"{self.folder}/{name}")
        return self._writers[name]

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Stop writing after an error such as a full disk, which must not end the run."""
        try:
            yield
        except tf.errors.OpError as error:
            log.warning(
                "metrics for TensorBoard are no longer written: %s", error.message.splitlines()[0]
            )
            self._is_broken = True
            self._writers.clear()


def hyperparameters(config: Config) -> dict[str, bool | int | float | str]:
    """Return the keys of the configuration with their values. Lists and mappings are JSON."""
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
