"""The dry run in a child process, which loads TensorFlow and the user's code."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from flotilla.trainer.cluster import child_process
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import USAGE, ConfigError

# Time limit of the dry run, in seconds. It includes loading TensorFlow, which can take ten seconds.
SECONDS = 90.0
log = logging.getLogger(__name__)


class NotKnownError(ConfigError):
    """The dry run ended without a result."""


def require(config: Config, dataset: str = "", is_over: Callable[[], bool] = lambda: False) -> None:
    """Raise `ConfigError` if model and dataset do not fit.

    If the result is unknown, only log a warning, or nothing if `is_over` returns true.
    """
    if config.program.command:
        return
    try:
        try_fit(config, dataset)
    except NotKnownError as error:
        if not is_over():
            log.warning("cannot check whether the model fits the dataset: %s", error)


def begin(
    config: Config,
    dataset: str,
    on_mistake: Callable[[ConfigError], None],
    is_over: Callable[[], bool] = lambda: False,
) -> threading.Thread:
    """Start `require` in a thread, which passes a configuration error to `on_mistake`."""

    def work() -> None:
        try:
            require(config, dataset, is_over)
        except ConfigError as error:
            on_mistake(error)

    thread = threading.Thread(target=work, name="trial", daemon=True)
    thread.start()
    return thread


def try_fit(
    config: Config, dataset: str = "", seconds: float = SECONDS, *, elsewhere: bool = False
) -> dict[str, Any]:
    """Return the result of a dry run without a GPU. See `flotilla.trainer.training.dry_run.fit`.

    `dataset` is empty before it is prepared. `elsewhere` means that the run is on other machines,
    which may have other packages, files or network access. Raises `NotKnownError` after `seconds`,
    or if the process was killed or failed, and `ConfigError` if model and dataset do not fit.
    """
    try:
        return child_process.call(
            "flotilla.trainer",
            "fit",
            "--dataset",
            dataset,
            *(["--elsewhere"] if elsewhere else ()),
            config=config.model_dump_json(),
            seconds=seconds,
            variables={"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            loads=MODULES["chief"],
        )
    except child_process.ChildError as error:
        if error.code == USAGE:
            raise ConfigError(str(error)) from None
        raise NotKnownError(f"the dry run of the model failed ({error})") from None
