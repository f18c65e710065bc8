"""The process of a run: KFP's local runner, which patches `print`, runs one pipeline in it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from components.records.record import STOPPING
from pipelines.forked_steps import KFP_RUNTIME, forking
from trainer import events
from trainer.cluster import signals


def main() -> None:
    """Run pipeline `argv[1]` with the arguments in the folder `argv[2]`."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    signals.end_with_parent()
    # The steps read their parent from here; a shell runs between them and this process.
    os.environ.update(signals.parent_environment())
    # The running step ends by the signal; this process continues with the exit step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _no_further_step)
    # The runner puts the interpreter's path unquoted into a shell command, and replaces the word
    # `python3` in every parameter value by it: both are the same word here.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    sys.executable = "python3"
    arguments = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    with forking(folder, name) as fork_steps:
        # Meanwhile the fork server loads its modules.
        _load_kfp_without_client()
        fork_steps()
        _run(name, folder, arguments)
    events.emit(events.RunEnd())


def _run(name: str, folder: Path, arguments: Mapping[str, Any]) -> None:
    from kfp import local  # noqa: PLC0415

    from pipelines.training import PIPELINES  # noqa: PLC0415

    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(folder / "kfp"),
        raise_on_error=True,
    )
    PIPELINES[name](**arguments)


def _load_kfp_without_client() -> None:
    """Import the package alone: its client, and that of Kubernetes, take most of its import."""
    os.environ[KFP_RUNTIME] = "true"
    import_module("kfp")
    del os.environ[KFP_RUNTIME]


def _no_further_step(_number: int, _frame: FrameType | None) -> None:
    # The signal may have come between two steps: the next one reads the variable.
    if STOPPING not in os.environ:
        os.environ[STOPPING] = "1"
        events.emit(events.Interrupted())


if __name__ == "__main__":
    main()
