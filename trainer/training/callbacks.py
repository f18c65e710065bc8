"""The user's Keras callbacks, `training.callbacks`, on the task that publishes checkpoints.

Training has no epochs, so an epoch of a callback is the interval between two validations
(`training.validate_every`). A callback may read metrics, write summaries with `tf.summary`, and end
training by setting `self.model.stop_training = True`. Batch hooks are rejected, because training
steps run in graphs, often in other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from flotilla.trainer.config.main_metric import VALIDATION
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError

KEY = "training.callbacks"
# The hooks that training calls. Keras also has batch hooks and prediction hooks.
CALLED = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_test_begin",
    "on_test_end",
)
_KERAS_PREFIX = "val_"


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
