"""The journal of an attempt: history rows, TensorBoard, events, checkpoints and Keras callbacks.

If several tasks run the outer loop, one writes the journal. The others keep the rows in memory, so
that all tasks make the same decisions.

The task that publishes checkpoints also calls the user's callbacks, `training.callbacks`. Training
has no epochs, so an epoch of a callback is the interval between two validations
(`training.validate_every`). A callback may read metrics, write summaries with `tf.summary`, and end
training by setting `self.model.stop_training = True`. Batch hooks are rejected, because training
steps run in graphs, often in other processes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from flotilla.trainer import events
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from flotilla.trainer.checkpoints.history import History
from flotilla.trainer.checkpoints.index import RECOVERED
from flotilla.trainer.cluster.launcher import find_run_id
from flotilla.trainer.config.main_metric import VALIDATION, VALIDATION_LOSS
from flotilla.trainer.config.schema import Config, TrainingConfig
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.strategies.input_position import Stream
from flotilla.trainer.strategies.strategy import Problem
from flotilla.trainer.telemetry.tensorboard import TensorBoardLog

log = logging.getLogger(__name__)
MAX_ROWS = 2000
INPUT_POSITION = "input_position"
KEY = "training.callbacks"
# The hooks that training calls. Keras also has batch hooks and prediction hooks.
CALLED = (
    "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_test_begin",
    "on_test_end",
)  # fmt: skip
_KERAS_PREFIX = "val_"

_PROGRESS = ("global_step", "loss", "learning_rate", "steps_per_second", "seconds", "epoch")


class Journal:
    """A writer of the history, the events and the checkpoints of an attempt."""

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        start: int,
        epoch: float = 0.0,
        *,
        publishes: bool = True,
    ) -> None:
        """Read the rows up to `start`. `epoch` is the steps per epoch, or 0 if unknown.

        Without `publishes`, the journal writes and emits nothing.
        """
        self._config, self._publishes = config, publishes
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
        if not self._publishes:
            return
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
        if not self._publishes:
            return
        speed = row["steps_per_second"]
        left = round((self._steps - row["global_step"]) / speed, 1) if speed else 0.0
        known = {name: value for name, value in row.items() if name in _PROGRESS}
        metrics = {name: value for name, value in row.items() if name not in _PROGRESS}
        known |= {"steps": self._steps, "epochs": self._epochs, "seconds_left": left}
        events.emit(events.Progress(metrics=metrics, **known))

    def emit_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Emit the metrics of a validation at a global step."""
        if self._publishes:
            events.emit(events.Validation(global_step=step, metrics=metrics))

    def add(self, row: dict[str, Any]) -> None:
        """Add a row to the history, which keeps all validations and up to `MAX_ROWS` other rows."""
        if not self._publishes:
            self.rows.append(row)
            return
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
        if self._publishes:
            self._checkpoints.prepare(variables, io_device)

    def save(
        self,
        variables: Mapping[str, tf.Variable],
        io_device: str | None,
        visited: Mapping[str, Any],
        recovered: Mapping[str, Any],
    ) -> str:
        """Save a checkpoint, unless another task does, and return its URI. Raises `UserError`."""
        if not self._publishes:
            self._checkpoints.last = self._checkpoints.build_uri(variables)
            return self.last_checkpoint
        metrics = {name: each for name, each in self._newest.items() if name != "global_step"}
        more = {INPUT_POSITION: dict(visited), RECOVERED: dict(recovered)}
        fields = {
            **self._fields,
            "metrics": metrics,
            **{name: each for name, each in more.items() if each},
        }
        return self._checkpoints.save(variables, io_device=io_device, fields=fields)


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


class CallbackError(UserError, AttributeError):
    """A callback uses an attribute of the model that callbacks cannot use.

    This error is also an `AttributeError`, so that `hasattr` returns false.
    """


class ModelView:
    """The `self.model` of callbacks, which has only a flag that ends training."""

    def __init__(self) -> None:
        """Initialize the flag to continue training."""
        self.stop_training = False

    def __getattr__(self, name: str) -> Any:
        """Reject all other attributes of a Keras model."""
        raise CallbackError(
            f"{KEY}: a callback uses model.{name}; callbacks can use only metrics and "
            "model.stop_training, because a strategy may keep the variables on other tasks"
        )


class Callbacks:
    """The callbacks of one attempt, called in the order of the configuration."""

    def __init__(self, training: TrainingConfig, *, publishes: bool) -> None:
        """Create the callbacks on the task that publishes. Raises `UserError`."""
        self._model = ModelView()
        names = training.callbacks if publishes else ()
        self._each = [(name, _create(name)) for name in names]
        self._interval = training.validate_every or training.steps
        epochs = -(-training.steps // self._interval)
        for _, callback in self._each:
            callback.set_params({"epochs": epochs, "steps": self._interval, "verbose": 0})
            callback.set_model(self._model)

    def __bool__(self) -> bool:
        """Return whether there is a callback."""
        return bool(self._each)

    @property
    def stop(self) -> bool:
        """Whether a callback requested the end of training."""
        return bool(self._model.stop_training)

    def begin(self, step: int) -> None:
        """Notify the callbacks that an attempt begins at a global step."""
        self._call("on_train_begin")
        self._call("on_epoch_begin", step // self._interval)

    def end_interval(self, row: Mapping[str, Any], is_last: bool) -> None:
        """Notify the callbacks that an interval ends, with its history row under Keras's names."""
        logs = _to_logs(row)
        measured = {
            name.removeprefix(_KERAS_PREFIX): value
            for name, value in logs.items()
            if name.startswith(_KERAS_PREFIX)
        }
        if measured:
            self._call("on_test_begin")
            self._call("on_test_end", logs=measured)
        epoch = max(0, -(-int(row["global_step"]) // self._interval) - 1)
        self._call("on_epoch_end", epoch, logs=logs)
        if not is_last and not self.stop:
            self._call("on_epoch_begin", epoch + 1)

    def end(self, row: Mapping[str, Any]) -> None:
        """Notify the callbacks that training ends, with the last row of the history."""
        self._call("on_train_end", logs=_to_logs(row))

    def _call(self, hook: str, *args: Any, logs: Mapping[str, Any] | None = None) -> None:
        for name, callback in self._each:
            with _report_errors(name, hook):
                getattr(callback, hook)(*args, logs=dict(logs or {}))


def _create(name: str) -> keras.callbacks.Callback:
    with _report_errors(name, "__init__"):
        return _find_class(name)()


def _find_class(name: str) -> type[keras.callbacks.Callback]:
    found = user_code.find_named(KEY, name, "Callback")
    if not (isinstance(found, type) and issubclass(found, keras.callbacks.Callback)):
        raise ConfigError(f"{KEY}: {name} is not a class derived from keras.callbacks.Callback")
    if unsupported := list(_list_unsupported(found)):
        raise ConfigError(
            f"{KEY}: {name} has {unsupported[0]}, which is never called, because steps run in "
            f"graphs, often in other processes; use {', '.join(CALLED)}"
        )
    return found


def _list_unsupported(found: type[keras.callbacks.Callback]) -> Iterator[str]:
    base = keras.callbacks.Callback
    for hook in dir(base):
        overrides = getattr(found, hook) is not getattr(base, hook)
        if hook.startswith("on_") and hook not in CALLED and overrides:
            yield hook


@contextmanager
def _report_errors(name: str, hook: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    # A callback may raise any exception.
    except Exception as error:
        line = user_code.format_error(error)
        raise UserError(f"{KEY}: {name}.{hook} raised {line}") from error


def _to_logs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row under Keras's names, such as `val_loss`."""
    return {
        name.replace(VALIDATION, _KERAS_PREFIX, 1) if name.startswith(VALIDATION) else name: value
        for name, value in row.items()
        if isinstance(value, int | float)
    }


def check_callbacks(training: TrainingConfig) -> None:
    """Raise `ConfigError` if a callback does not exist or is not supported."""
    for name in training.callbacks:
        _find_class(name)
