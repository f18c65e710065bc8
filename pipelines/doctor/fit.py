"""Whether the model takes what the dataset gives, tried by the trainer in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from pipelines.doctor.examination import Finding
from trainer import user_code
from trainer.cluster import signals
from trainer.config.schema import Config
from trainer.errors import DONE

# TensorFlow alone takes ten of them on a busy machine.
SECONDS = 90.0
_PREFIX = "flotilla: "
_REMEDY = "flotilla doctor --set model.name=NAME --set data.dataset=NAME"


def fits(config: Config, seconds: float = SECONDS) -> Finding:
    """Build the model for one example of the dataset; nothing is downloaded, no GPU is used."""
    if find_spec("tensorflow") is None:
        return Finding("skipped", "TensorFlow is not installed here")
    prefix = "flotilla-doctor-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
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
            message = f"not known: the model was not built in {seconds:g} s"
            return Finding("warn", message, "flotilla doctor")
    if ended.returncode == DONE:
        return Finding("ok", _said(config, json.loads(ended.stdout.splitlines()[-1])))
    lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["no message"]
    said = [line.removeprefix(_PREFIX) for line in lines if line.startswith(_PREFIX)]
    return Finding("fail", (said or lines)[-1], _REMEDY)


def _environment() -> dict[str, str]:
    own = {**user_code.environment(), **signals.parent_environment()}
    return {**os.environ, **own, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def _said(config: Config, found: dict[str, object]) -> str:
    inputs = found["inputs"]
    assert isinstance(inputs, dict)
    takes = ", ".join(f"{name} ({form})" for name, form in inputs.items())
    targets = found["targets"]
    assert isinstance(targets, dict)
    gives = ", ".join(f"{name} ({form})" for name, form in targets.items())
    return (
        f"{config.model.name} takes {takes} of {config.data.dataset} for {found['task']} of "
        f"{gives}: {found['parameters']} parameters"
    )
