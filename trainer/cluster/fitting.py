"""What is tried of a configuration by `python -m trainer` in a process of its own: does it fit?

TensorFlow and the user's code stay out of the process that asks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import user_code
from trainer.cluster import signals
from trainer.config.schema import Config
from trainer.errors import DONE, ConfigError

# TensorFlow alone takes ten of them on a busy machine.
SECONDS = 90.0
CALIBRATION_SECONDS = 300.0
_PREFIX = "flotilla: "
log = logging.getLogger(__name__)


class NotKnownError(ConfigError):
    """The trial took too long, or too much memory, to say whether it fits."""


def require(config: Config, dataset: str = "") -> None:
    """Raise `ConfigError` where it does not fit; say so where it is not known."""
    try:
        tried(config, dataset)
    except NotKnownError as error:
        log.warning("whether model and dataset fit is not known: %s", error)


def tried(config: Config, dataset: str = "", seconds: float = SECONDS) -> dict[str, Any]:
    """Return what fits: see `trainer.training.dry_run.fit`. No GPU is used.

    Args:
        config: the run.
        dataset: URI of its dataset; before that is prepared, empty.
        seconds: how long to wait at most.

    Raises:
        NotKnownError: it takes longer than `seconds`, or was killed.
        ConfigError: it does not fit; the message is that of the trainer.
    """
    no_gpu = {"CUDA_VISIBLE_DEVICES": "-1"}
    return _answer("fit", config, ["--dataset", dataset], seconds, no_gpu)


def calibrated(
    config: Config, servers: Sequence[int], seconds: float = CALIBRATION_SECONDS
) -> dict[str, Any]:
    """Return what a gradient costs: see `trainer.training.calibration.calibrate`.

    Raises:
        NotKnownError: it takes longer than `seconds`, or was killed.
        ConfigError: it cannot be measured; the message is that of the trainer.
    """
    one_core = {"TF_NUM_INTRAOP_THREADS": "1"}
    arguments = ["--servers", *map(str, servers)]
    return _answer("calibrate", config, arguments, seconds, one_core)


def _answer(
    stage: str,
    config: Config,
    arguments: Sequence[str],
    seconds: float,
    variables: Mapping[str, str],
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="flotilla-fit-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "config.json")
        path.write_text(config.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "trainer", stage, "--config", str(path)]
        try:
            ended = subprocess.run(
                [*command, "--workdir", folder, *arguments],
                env={**_environment(), **variables},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise NotKnownError(f"the model was not built in {seconds:g} s") from None
    if ended.returncode == DONE:
        found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        return found
    if ended.returncode < 0:
        killed = signal.Signals(-ended.returncode).name
        raise NotKnownError(f"the trial was ended by {killed}; is there enough memory?")
    lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["no message"]
    said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    raise ConfigError((said or lines)[-1])


def _environment() -> dict[str, str]:
    own = {**user_code.environment(), **signals.parent_environment()}
    return {**os.environ, **own, "TF_CPP_MIN_LOG_LEVEL": "3"}
