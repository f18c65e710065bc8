"""Reads the status and finds the process of a local run, from any process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from flotilla.components.records.step_record import OF_STEPS, step_records
from flotilla.pipelines.runs import local
from flotilla.pipelines.runs.outcome import RunResult, judge_outcome
from flotilla.trainer import events
from flotilla.trainer.events import RunEnd
from flotilla.trainer.events.event_lines import format_event
from flotilla.trainer.events.run_state import RunState, reduce_events
from flotilla.trainer.runtime.errors import DONE, FAILED
from flotilla.trainer.runtime.json_records import parse_number
from flotilla.trainer.storage.errors import report_errors

LOOK_SECONDS = 0.3
LOG = "pipeline.log"
# Part of the command line of a run's process; the command line ends with the run's folder.
_RUN_PROCESS = " -m flotilla.pipelines.runs.local_child "
_PROCESSES = Path("/proc")
_COLUMNS = 2


def is_local(workdir: Path, run_id: str) -> bool:
    """Return whether a run with this id exists below `workdir`."""
    marks = (workdir / run_id / name for name in (local.EVENTS, local.CONFIG))
    return is_name(run_id) and any(map(os.path.lexists, marks))


def is_name(run_id: str) -> bool:
    """Return whether a text is the name of a folder and not a path."""
    return run_id not in ("", "..") and Path(run_id).name == run_id


def run_ids(workdir: Path) -> list[str]:
    """Return the ids of the runs below `workdir`, newest first. Raises `UserError`."""
    found = local.list_runs(workdir)
    return sorted(found, key=lambda name: (found[name], name), reverse=True)


def statuses(workdir: Path, runs: Iterable[str]) -> list[RunResult]:
    """Return the result or the progress of each run, with status `unknown` if unreadable."""
    # List the processes before reading events: a run without a process writes no more events.
    working = {folder for _, folder in _run_processes()}
    folders = [(workdir / run).absolute() for run in runs]
    return [_status(folder, str(folder) in working) for folder in folders]


def read_status(workdir: Path, run_id: str) -> RunResult:
    """Return the result of a run, or its progress."""
    return statuses(workdir, [run_id])[0]


def _status(folder: Path, is_working: bool) -> RunResult:
    try:
        state = _state(folder)
    except OSError as error:
        message = f"cannot read {folder / local.EVENTS}: {error.strerror}"
        result = RunResult(status="unknown", exit_code=FAILED, message=message, steps=())
    else:
        result = _make_progress(state) if is_working else _judge_ended(state)
    return replace(result, run_id=folder.name, folder=folder)


def _state(folder: Path) -> RunState:
    path = folder / local.EVENTS
    if os.path.lexists(path) and not path.is_file():
        number = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(number, os.strerror(number), str(path))
    return reduce_events(events.read(folder / local.EVENTS, every=OF_STEPS))


def is_cancelled(workdir: Path, run_id: str) -> bool:
    """Return whether a run that is still running was asked to stop. Raises `UserError`."""
    folder = (workdir / run_id).absolute()
    if not find_process(folder):
        return False
    with report_errors(f"read {folder / local.EVENTS}"):
        return _state(folder).interrupted


def find_process(folder: Path) -> int:
    """Return the PID of the process of the run in this folder, or 0."""
    return next((pid for pid, of in _run_processes() if of == str(folder)), 0)


def _run_processes() -> Iterator[tuple[int, str]]:
    """Yield the PID of each run's process, and the folder of the run."""
    for pid, words in _processes():
        _, is_run, arguments = words.rstrip().partition(_RUN_PROCESS)
        if is_run:
            # Find the start of the absolute path, because the path may contain spaces.
            yield pid, "/" + arguments.partition(" /")[2]


def _make_progress(state: RunState) -> RunResult:
    steps = tuple(
        step
        if step.ended is not None
        else replace(
            step,
            status="running",
            error="",
            seconds=max(time.time() - step.began, 0.0),
            metrics=state.progress_since(step.began),
        )
        for step in step_records(state)
    )
    message = format_event(state.suspension) if state.suspension else ""
    return RunResult(status="running", exit_code=DONE, message=message, steps=steps)


def _judge_ended(state: RunState) -> RunResult:
    # If a runner is killed between two steps, neither an event nor a failed step shows it.
    return judge_outcome(state, DONE if state.newest(RunEnd) else None, interrupted=False)


def _processes() -> Iterator[tuple[int, str]]:
    """Yield the PID and the command line of every process."""
    if _PROCESSES.is_dir() and sys.platform == "linux":
        for entry in _PROCESSES.iterdir():
            if not (process := parse_number(entry.name)):
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
            except OSError:
                continue
            yield process, words.replace("\0", " ")
        return
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        columns = line.split(None, 1)
        if len(columns) == _COLUMNS:
            yield int(columns[0]), columns[1]
