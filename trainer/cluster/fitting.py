"""Try in a process of its own, which loads TensorFlow and the user's code, what fits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from flotilla.trainer.cluster import child_process
from flotilla.trainer.cluster.process import MODULES
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import USAGE, ConfigError

# TensorFlow alone takes ten of them on a busy machine.
SECONDS = 90.0
log = logging.getLogger(__name__)


class NotKnownError(ConfigError):
    """The trial has not come to an end that says whether it fits."""


def require(config: Config, dataset: str = "") -> None:
    """Raise `ConfigError` where it does not fit; say so where it is not known."""
    try:
        try_fit(config, dataset)
    except NotKnownError as error:
        _say_not_known(error)


def _say_not_known(error: NotKnownError) -> None:
    log.warning("whether model and dataset fit is not known: %s", error)


def begin(
    config: Config,
    dataset: str,
    on_mistake: Callable[[ConfigError], None],
    is_over: Callable[[], bool] = lambda: False,
) -> threading.Thread:
    """Return a thread that tries what fits; it calls `on_mistake` with what does not.

    Once what it tries for `is_over`, which ends the trial too, nothing is said of it.
    """

    def work() -> None:
        try:
            try_fit(config, dataset)
        except NotKnownError as error:
            if not is_over():
                _say_not_known(error)
        except ConfigError as error:
            on_mistake(error)

    thread = threading.Thread(target=work, name="trial", daemon=True)
    thread.start()
    return thread


def try_fit(
    config: Config, dataset: str = "", seconds: float = SECONDS, *, elsewhere: bool = False
) -> dict[str, Any]:
    """Return what fits, without a GPU: see `flotilla.trainer.training.dry_run.fit`.

    `dataset` is empty before it is prepared. Of a run on other machines, `elsewhere`, it is not
    known what they have: packages that are not installed here, files, and a network.
    Raises `NotKnownError` after `seconds`, or where the process was killed or came to no end of its
    own, and `ConfigError` where it does not fit.
    """
    try:
        return child_process.call(
            "flotilla.trainer",
            "fit",
            "--dataset",
            dataset,
            *(["--elsewhere"] if elsewhere else ()),
            request=config.model_dump_json(),
            option="--config",
            seconds=seconds,
            variables={"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            loads=MODULES["chief"],
        )
    except child_process.ChildError as error:
        if error.code == USAGE:
            raise ConfigError(str(error)) from None
        raise NotKnownError(f"the trial of the model: {error}") from None
