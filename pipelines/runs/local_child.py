"""The process of a local run. It is separate because KFP's local runner patches `print`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from flotilla.components.kfp_internals import load_without_client
from flotilla.components.records.record import STOPPING
from flotilla.components.table import FIRST_STAGE
from flotilla.pipelines.forked_steps import TRAINING, forking
from flotilla.trainer import events
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.form import from_form
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import ConfigError

EVENTS = "events.jsonl"
_SECONDS_TO_BEGIN, _PAUSE = 60.0, 0.1
_is_over = threading.Event()


def main() -> None:
    """Run pipeline `argv[1]` with the arguments in the folder `argv[-1]`.

    A resumed run has the argument `resumed` before the folder.
    """
    name, *is_resumed, folder = *sys.argv[1:-1], Path(sys.argv[-1])
    signals.end_with_parent()
    # The steps read the PID of this process from the environment, because their parent is a shell.
    os.environ.update(signals.parent_environment())
    # The signal ends the running step; this process continues with the exit step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _no_further_step)
    # The runner inserts the interpreter's path unquoted into a shell command, and replaces the word
    # `python3` by this path in every parameter value. Therefore set the path to `python3`.
    path = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{path}"
    sys.executable = "python3"
    arguments = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    with forking(folder, name) as fork_steps:
        # Import KFP while the fork server loads its modules.
        load_without_client()
        fork_steps()
        if name in TRAINING:
            _begin_trial(folder, arguments, is_resumed=bool(is_resumed))
        try:
            _run(name, folder, arguments)
        finally:
            _is_over.set()
    events.emit(events.RunEnd())


def _begin_trial(folder: Path, arguments: Mapping[str, Any], *, is_resumed: bool) -> None:
    """Start a dry run of the model in parallel with the steps. An error ends the run."""
    config = from_form(arguments)
    if is_resumed:
        # A resumed run starts from its own checkpoints, so do not test the warm start.
        training = config.training.model_copy(update={"warm_start": ""})
        config = config.model_copy(update={"training": training})
    began = time.monotonic()

    def end(error: ConfigError) -> None:
        if STOPPING in os.environ or not _await_first_stage(folder):
            return
        os.environ[STOPPING] = "1"
        events.emit(
            events.StepEnd(
                step=FIRST_STAGE,
                status="failed",
                exit_code=error.exit_code,
                error=str(error),
                seconds=round(time.monotonic() - began, 2),
            )
        )
        os.killpg(os.getpgrp(), signal.SIGTERM)

    fitting.begin(config, arguments.get("dataset", ""), end, _is_over.is_set)


def _await_first_stage(folder: Path) -> bool:
    """Wait for the first stage to end, and return False if a stage failed or the wait timed out.

    After a failure, the dry run must not repeat an error that a task may have reported.
    """
    until = time.monotonic() + _SECONDS_TO_BEGIN
    while time.monotonic() < until:
        found = reduce_events(events.read(folder / EVENTS), newest_start=True)
        ends = {each.step: each.end for each in found.tries if each.end}
        if any(each.status == "failed" for each in ends.values()):
            return False
        if FIRST_STAGE in ends:
            return True
        time.sleep(_PAUSE)
    return False


def _run(name: str, folder: Path, arguments: Mapping[str, Any]) -> None:
    from kfp import local  # noqa: PLC0415

    from flotilla.pipelines.training import PIPELINES  # noqa: PLC0415

    local.init(
        runner=local.SubprocessRunner(use_venv=False),
        pipeline_root=str(folder / "kfp"),
        raise_on_error=True,
    )
    PIPELINES[name](**arguments)


def _no_further_step(_number: int, _frame: FrameType | None) -> None:
    # The signal may arrive between two steps; then the next step reads the variable.
    if STOPPING not in os.environ:
        os.environ[STOPPING] = "1"
        events.emit(events.Interrupted())


if __name__ == "__main__":
    main()
