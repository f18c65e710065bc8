"""Flotilla's environment variables and their allowed values, which are checked at the start."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress

from flotilla.trainer.runtime.errors import ConfigError

Form = tuple[str, Callable[[str], object]]


def _is_seconds(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text)) and float(text) >= 0
    return False


def _is_object(text: str) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict)
    return False


_TEXT: Form = ("a single line of printable text", str.isprintable)
_PROCESS: Form = ("the id of a process", re.compile(r"[0-9]{1,9}").fullmatch)
_OBJECT: Form = ("a JSON object", _is_object)
_NAME: Form = ("a name of letters, digits and . _ -", re.compile(r"\w[\w.-]{0,127}").fullmatch)
VARIABLES: Mapping[str, Form] = {
    "FLOTILLA_STORAGE_DEADLINE": ("a number of seconds", _is_seconds),
    "FLOTILLA_METRICS_HOST": (
        "an address of this machine, or * for all",
        re.compile(r"\*|[\w.:-]{1,253}").fullmatch,
    ),
    "FLOTILLA_KFP_UI": _TEXT,
    "FLOTILLA_COMMIT": _TEXT,
    "FLOTILLA_SIGNING_KEY": _TEXT,
    "FLOTILLA_VERIFYING_KEY": _TEXT,
    "FLOTILLA_MODEL_REGISTRY": _TEXT,
    "FLOTILLA_EVENTS": _TEXT,
    "FLOTILLA_RUN_FOLDER": _TEXT,
    "FLOTILLA_USER_FOLDER": _TEXT,
    "FLOTILLA_CODE": _TEXT,
    "FLOTILLA_RUN_ID": _NAME,
    "FLOTILLA_JOB": _TEXT,
    "FLOTILLA_STOPPING": _TEXT,
    "FLOTILLA_DEBUGGER": _TEXT,
    "FLOTILLA_PARENT": _PROCESS,
    "FLOTILLA_FORK_SERVER": _NAME,
    "FLOTILLA_HEARTBEAT": (
        "of the form DESCRIPTOR:SECONDS",
        re.compile(r"[0-9]{1,9}:[0-9]{1,9}(\.[0-9]+)?").fullmatch,
    ),
    "FLOTILLA_GUARD_PORT": (
        "a port from 1 to 65535",
        lambda text: re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 1 << 16,
    ),
    "FLOTILLA_CONFIG": _OBJECT,
    "FLOTILLA_LAUNCHER": _OBJECT,
    "FLOTILLA_NAMESPACE": _TEXT,
    "FLOTILLA_DATASET_FILES": _TEXT,
    "FLOTILLA_CHECKPOINTS": _TEXT,
    "FLOTILLA_LOGS": _TEXT,
    "FLOTILLA_TASK_INDEX": ("a whole number of at least 0", re.compile(r"[0-9]{1,5}").fullmatch),
}


def read_variable(name: str) -> str:
    """Return the value of a variable, or an empty string if it is not set. Raises `ConfigError`."""
    form, is_right = VARIABLES[name]
    text = os.environ.get(name, "")
    if text and not is_right(text):
        raise ConfigError(f"{name}: {text[:100]!r} is not {form}; unset it, or correct it")
    return text


def check_variables() -> None:
    """Raise a `ConfigError` if an environment variable has an invalid value."""
    for name in VARIABLES:
        read_variable(name)
