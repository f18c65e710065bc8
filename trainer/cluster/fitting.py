"""Whether a configuration fits, tried by `python -m trainer fit` in a process of its own.

TensorFlow and the user's code stay out of the process that asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from trainer import user_code
from trainer.cluster import signals
from trainer.config.schema import Config
from trainer.errors import DONE, ConfigError

# TensorFlow alone takes ten of them on a busy machine.
SECONDS = 90.0
_PREFIX = "flotilla: "


class NotKnownError(ConfigError):
    """The trial took too long to say whether it fits."""


def tried(config: Config, seconds: float = SECONDS) -> dict[str, Any]:
    """Return what fits: see `trainer.training.dry_run.Fit`. No GPU is used.

    Raises:
        NotKnownError: it takes longer than `seconds`.
        ConfigError: it does not fit; the message is that of the trainer.
    """
    with tempfile.TemporaryDirectory(prefix="flotilla-fit-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "config.json")
        path.write_text(config.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", "trainer", "fit", "--config", str(path)]
        try:
            ended = subprocess.run(
                [*command, "--workdir", folder],
                env=_environment(),
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
    lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["no message"]
    said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    raise ConfigError((said or lines)[-1])


def _environment() -> dict[str, str]:
    own = {**user_code.environment(), **signals.parent_environment()}
    return {**os.environ, **own, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
