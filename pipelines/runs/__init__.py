"""The Python API: runs on this machine and on a KFP instance. It returns values, prints nothing.

See `docs/how-to/python-api.md`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla.pipelines.runs.control import Cancellation, cancel, logs, status
    from flotilla.pipelines.runs.kfp_access import Instance
    from flotilla.pipelines.runs.kfp_watch import follow
    from flotilla.pipelines.runs.local import prepare, run, train
    from flotilla.pipelines.runs.outcome import RunResult
    from flotilla.pipelines.runs.submission import Submitted, submit

# Loaded when first used: the client of KFP costs half a second, which `flotilla --help` and runs
# on this machine do without.
_HOMES = {
    "Cancellation": "control",
    "Instance": "kfp_access",
    "RunResult": "outcome",
    "Submitted": "submission",
    "cancel": "control",
    "follow": "kfp_watch",
    "logs": "control",
    "prepare": "local",
    "run": "local",
    "status": "control",
    "submit": "submission",
    "train": "local",
}

__all__ = [
    "Cancellation",
    "Instance",
    "RunResult",
    "Submitted",
    "cancel",
    "follow",
    "logs",
    "prepare",
    "run",
    "status",
    "submit",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
