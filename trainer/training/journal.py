"""The journal of an attempt: history rows, TensorBoard, events and checkpoints.

If several tasks run the outer loop, one writes the journal. The others keep the rows in memory
(`UnpublishedJournal`), so that all tasks make the same decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tensorflow as tf

from flotilla.trainer import events
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from flotilla.trainer.checkpoints.contents import RECOVERED
from flotilla.trainer.checkpoints.history import History
from flotilla.trainer.cluster.launcher import find_run_id
from flotilla.trainer.config.main_metric import VALIDATION, VALIDATION_LOSS
from flotilla.trainer.config.schema import Config
from flotilla.trainer.strategies.input_position import Stream
from flotilla.trainer.strategies.strategy import Problem
from flotilla.trainer.telemetry.tensorboard import TensorBoardLog

log = logging.getLogger(__name__)
MAX_ROWS = 2000
INPUT_POSITION = "input_position"

_PROGRESS = ("global_step", "loss", "learning_rate", "steps_per_second", "seconds", "epoch")


class Journal:
    """A writer of the history, the events and the checkpoints of an attempt."""

    def __init__(
        self, config: Config, checkpoints: Checkpoints, start: int, epoch: float = 0.0
    ) -> None:
        """Read the rows up to `start`. `epoch` is the steps per epoch, or 0 if unknown."""
        self._config = config
        self._steps = config.training.steps
        self._epochs = self._steps / epoch if epoch else 0.0
        self._fields: dict[str, Any] = {
            "strategy": config.training.strategy,
            "config_hash": config.digest(),
            "optimizer": config.training.optimizer.name,
            "freeze": list(config.training.freeze),
            "positive": checkpoints.positive,
        }
        self._checkpoints = checkpoints
        self._history = History(checkpoints.uri, start=start, file=checkpoints.history)
        last = self._history.rows[-1] if self._history.rows else {}
        if last.get("global_step") != start:
            # The values on the servers are newer than this row, so its validation is outdated.
            last = {name: each for name, each in last.items() if not name.startswith(VALIDATION)}
        self._newest = last
        self._board = TensorBoardLog(checkpoints.logs, find_run_id(checkpoints.uri))

    @property
    def logs(self) -> Path | None:
        """The run's local folder for TensorBoard, or None if there is none."""
        return self._board.folder

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the history so far."""
        return self._history.rows

    @property
    def last_checkpoint(self) -> str:
        """The URI of the newest checkpoint, or an empty string."""
        return self._checkpoints.last

    def begin(self, start: int, fields: Mapping[str, Any], saved: int = -1) -> None:
        """Emit an event for a new attempt. `saved` is the newest checkpoint's step, or -1."""
        self._fields |= fields
        events.emit(
            events.AttemptBegin(
                global_step=start,
                steps=self._steps,
                epochs=self._epochs,
                resumed=start > 0,
                checkpoint=saved if saved < start else -1,
            )
        )
        self._board.add_configuration(self._config)

    def progress(self, row: Mapping[str, Any]) -> None:
        """Emit the progress of training."""
        speed = row["steps_per_second"]
        left = round((self._steps - row["global_step"]) / speed, 1) if speed else 0.0
        known = {name: value for name, value in row.items() if name in _PROGRESS}
        metrics = {name: value for name, value in row.items() if name not in _PROGRESS}
        known |= {"steps": self._steps, "epochs": self._epochs, "seconds_left": left}
        events.emit(events.Progress(metrics=metrics, **known))

    def emit_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Emit the metrics of a validation at a global step."""
        events.emit(events.Validation(global_step=step, metrics=metrics))

    def add(self, row: dict[str, Any]) -> None:
        """Add a row to the history, which keeps all validations and up to `MAX_ROWS` other rows."""
        since = row["global_step"] - (self.rows[-1]["global_step"] if self.rows else 0)
        asked_for = VALIDATION_LOSS in row or row["global_step"] >= self._steps
        if asked_for or since * MAX_ROWS >= self._steps:
            self._history.add(row)
            self._board.add(row)
        if row["global_step"] >= self._steps > self._newest.get("global_step", 0):
            _warn_of_empty_tables(row.get("tables", {}))
        self._newest = row

    def summaries(self, step: int) -> AbstractContextManager[None]:
        """Return a context in which the `tf.summary` of callbacks writes to the run's logs."""
        return self._board.as_default(step)

    def prepare_save(self, variables: Mapping[str, tf.Variable], io_device: str | None) -> None:
        """Prepare to save these variables, so that the first save is fast."""
        self._checkpoints.prepare(variables, io_device)

    def save(
        self,
        variables: Mapping[str, tf.Variable],
        io_device: str | None,
        visited: Mapping[str, Any],
        recovered: Mapping[str, Any],
    ) -> str:
        """Save a checkpoint and return its URI. Raises `UserError`."""
        metrics = {name: each for name, each in self._newest.items() if name != "global_step"}
        more = {INPUT_POSITION: dict(visited), RECOVERED: dict(recovered)}
        fields = {
            **self._fields,
            "metrics": metrics,
            **{name: each for name, each in more.items() if each},
        }
        return self._checkpoints.save(variables, io_device=io_device, fields=fields)


class UnpublishedJournal(Journal):
    """The journal of a task that does not publish. It writes and emits nothing."""

    def begin(self, start: int, fields: Mapping[str, Any], saved: int = -1) -> None:
        """Emit nothing."""

    def progress(self, row: Mapping[str, Any]) -> None:
        """Emit nothing."""

    def emit_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Emit nothing."""

    def add(self, row: dict[str, Any]) -> None:
        """Keep one row in memory."""
        self._history.rows.append(row)

    def prepare_save(self, variables: Mapping[str, tf.Variable], io_device: str | None) -> None:
        """Do nothing, because this task does not save."""

    def save(
        self,
        variables: Mapping[str, tf.Variable],
        io_device: str | None,  # noqa: ARG002
        visited: Mapping[str, Any],  # noqa: ARG002
        recovered: Mapping[str, Any],  # noqa: ARG002
    ) -> str:
        """Save nothing, and return the URI at which the publishing task saves."""
        self._checkpoints.last = self._checkpoints.build_uri(variables)
        return self.last_checkpoint


def read_origin(found: RestoredCheckpoint | None) -> dict[str, str]:
    """Return the fields in the run's manifests that describe its initial weights."""
    fields = found.fields if found else {}
    return {name: str(fields.get(name, "")) for name in ("warmed_from", "warm_start")}


def open_stream(problem: Problem, found: RestoredCheckpoint | None) -> Stream | None:
    """Return the stream at the checkpoint's input position, or None if there is no stream."""
    saved = found.fields.get(INPUT_POSITION) if found else None
    if not problem.stream:
        if found and saved:
            log.warning(
                "not using the input position of %s, because data.partition is not dynamic",
                found.uri,
            )
        return None
    return problem.stream.resume(saved, found.uri) if found else problem.stream


def _warn_of_empty_tables(tables: Mapping[str, Mapping[str, int]]) -> None:
    """Emit an event for each table without rows, with a reason derived from its counts."""
    for name, table in tables.items():
        if table["rows"]:
            continue
        if table["evicted"]:
            why = "all of its rows were evicted by age: raise max_age"
        elif away := table["turned_away"]:
            why = f"{away} lookups found no row for their id: lower min_count, or train longer"
        else:
            why = "it was frozen, or training never looked up an id in it"
        events.emit(events.TableEmpty(table=name, why=why))
