"""Whether the model takes what the dataset gives, tried by the trainer in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pipelines.doctor.examination import Finding
from trainer.cluster import fitting
from trainer.config.schema import Config
from trainer.errors import ConfigError

_REMEDY = "flotilla doctor --set model.name=NAME --set data.dataset=NAME"


def fits(config: Config, seconds: float = fitting.SECONDS) -> Finding:
    """Try one step of the model on made-up examples; nothing is downloaded, no GPU is used."""
    if find_spec("tensorflow") is None:
        return Finding("skipped", "TensorFlow is not installed here")
    try:
        found = fitting.tried(config, seconds=seconds)
    except fitting.NotKnownError as error:
        return Finding("warn", f"not known: {error}", "flotilla doctor")
    except ConfigError as error:
        return Finding("fail", str(error), _REMEDY)
    return Finding("ok", _said(config, found))


def _said(config: Config, found: dict[str, Any]) -> str:
    takes = ", ".join(f"{name} ({form})" for name, form in found["inputs"].items())
    gives = ", ".join(f"{name} ({form})" for name, form in found["targets"].items())
    return (
        f"{config.model.name} takes {takes} of {config.data.name} for {found['task']} of "
        f"{gives}: {found['parameters']} parameters"
    )
