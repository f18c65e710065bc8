"""Flotilla: TensorFlow models trained on parameter servers, as a Kubeflow pipeline.

This is the public interface: the commands of `flotilla` as functions, for a notebook, a script or a
scheduler. Every function returns a value, and only `predict` with `output="-"` prints. A run that
cannot be started raises a `UserError`. A run that starts and then fails is returned with its
`status`.

    import flotilla

    result = flotilla.run("configs/digits.yaml", training={"steps": 200})
    result.status, result.metrics["accuracy"], result.report

Each name is loaded when it is first used. None of them imports TensorFlow. Names that are not in
`__all__` may change in any version. For your own pipelines, use `flotilla.components`.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flotilla.pipelines import models
    from flotilla.pipelines.predict import Prediction, predict
    from flotilla.pipelines.replay import evaluate
    from flotilla.pipelines.runs.control import (
        Cancellation,
        Comparison,
        cancel,
        compare,
        logs,
        status,
    )
    from flotilla.pipelines.runs.kfp_access import Instance
    from flotilla.pipelines.runs.kfp_watch import follow
    from flotilla.pipelines.runs.local import prepare, run, train
    from flotilla.pipelines.runs.outcome import RunResult
    from flotilla.pipelines.runs.schedule import Scheduled, schedule
    from flotilla.pipelines.runs.submission import Submitted, submit
    from flotilla.pipelines.sweeps.local import SweepResult, sweep
    from flotilla.trainer import events
    from flotilla.trainer.config.schema import Config
    from flotilla.trainer.runtime.errors import ConfigError, UserError

__all__ = [
    "Cancellation",
    "Comparison",
    "Config",
    "ConfigError",
    "Instance",
    "Prediction",
    "RunResult",
    "Scheduled",
    "Submitted",
    "SweepResult",
    "UserError",
    "cancel",
    "compare",
    "evaluate",
    "events",
    "follow",
    "logs",
    "models",
    "predict",
    "prepare",
    "run",
    "schedule",
    "status",
    "submit",
    "sweep",
    "train",
]

# The module of each public name. A module is imported when its name is first used, because the
# import of the KFP client takes about a second.
_HOMES = {
    "flotilla.pipelines": ("models",),
    "flotilla.pipelines.predict": ("Prediction", "predict"),
    "flotilla.pipelines.replay": ("evaluate",),
    "flotilla.pipelines.runs.control": (
        "Cancellation",
        "Comparison",
        "cancel",
        "compare",
        "logs",
        "status",
    ),
    "flotilla.pipelines.runs.kfp_access": ("Instance",),
    "flotilla.pipelines.runs.kfp_watch": ("follow",),
    "flotilla.pipelines.runs.local": ("prepare", "run", "train"),
    "flotilla.pipelines.runs.outcome": ("RunResult",),
    "flotilla.pipelines.runs.schedule": ("Scheduled", "schedule"),
    "flotilla.pipelines.runs.submission": ("Submitted", "submit"),
    "flotilla.pipelines.sweeps.local": ("SweepResult", "sweep"),
    "flotilla.trainer": ("events",),
    "flotilla.trainer.config.schema": ("Config",),
    "flotilla.trainer.runtime.errors": ("ConfigError", "UserError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOME_OF[name]
    found = getattr(import_module(home), name, None) or import_module(f"{home}.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


# `python -m flotilla.trainer` puts the working folder first on `sys.path`. Remove it, because a
# `json.py` of the user there would hide the standard module.
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and any(f"{each}.".startswith(f"{__name__}.") for each in sys.orig_argv)
    and os.path.dirname(os.path.dirname(__file__)) != sys.path[0]
):
    del sys.path[0]
