"""Reads the status and the logs of a local run, and finds its process, from any process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flotilla.components.records.step_record import OF_STEPS, step_records
from flotilla.components.table import TRAIN, name_step_of
from flotilla.pipelines.runs import local
from flotilla.pipelines.runs.log_view import (
    Line,
    LogText,
    LogView,
    OnLine,
    RunnerText,
    merge_lines,
    split_times,
)
from flotilla.pipelines.runs.outcome import RunResult, judge_ended
from flotilla.trainer import events
from flotilla.trainer.cluster.process import LOG as TASK_LOG
from flotilla.trainer.events.progress import format_event
from flotilla.trainer.events.run_state import RunState, reduce_events
from flotilla.trainer.runtime.errors import DONE, FAILED, UserError
from flotilla.trainer.runtime.json_records import parse_number
from flotilla.trainer.runtime.user_code import innermost_frame
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
        result = _make_progress(state) if is_working else judge_ended(state)
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


def follow_logs(folder: Path, view: LogView, *, follow: bool = False, on_line: OnLine) -> None:
    """Pass a run's logs to `on_line`. With `follow`, continue until it ends. Raises `UserError`."""
    if not any((folder / name).is_file() for name in (local.EVENTS, LOG)):
        raise UserError(f"cannot read {folder / LOG}: the run has written nothing")
    tasks = [path.parent.name for path in _task_logs(folder)]
    if tasks or not follow:
        view.require_task(folder.name, tasks)
    logs = _Logs(folder)
    while True:
        # Check for the end of the run before reading, so that its last lines are read too.
        going = follow and find_process(folder) > 0
        lines = merge_lines(logs.read(whole=not going))
        view.leader = logs.leader
        for line in lines:
            for each in view.take(line):
                on_line(each)
        for each in view.flush() if going else view.end():
            on_line(each)
        if not going:
            return
        time.sleep(LOOK_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Where a run failed: the step to replay, the log with the cause, and the user's frame."""

    step: str
    log: Path
    frame: str


def find_failure(folder: Path) -> Failure | None:
    """Return where the newest start of a run failed, or None if no step failed."""
    ends: list[events.StepEnd] = []
    failed: events.TaskFailed | None = None
    trace = ""
    for event in events.read(folder / local.EVENTS):
        match event:
            case events.RunBegin():
                ends, failed, trace = [], None, ""
            case events.StepEnd() if event.status == "failed":
                ends.append(event)
            case events.TaskFailed():
                failed = event
            case events.UserCodeFailed():
                trace = event.traceback
    if not ends:
        return None
    is_training = ends[0].step == TRAIN
    trace = ends[0].traceback or (trace if is_training else "")
    log = Path(failed.log) if is_training and failed and failed.log else folder / LOG
    return Failure(step=name_step_of(ends[0].step), log=log, frame=innermost_frame(trace))


def _task_logs(folder: Path) -> list[Path]:
    return sorted((folder / "cluster").glob(f"*/{TASK_LOG}"))


class _Logs:
    """Reads new lines from the files of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._events = _File(folder / local.EVENTS, LogText())
        self.leader = "chief-0"

    def read(self, *, whole: bool) -> Iterator[Line]:
        """Yield the new lines of all files. With `whole`, also yield an incomplete last line."""
        for path in [self._folder / LOG, *_task_logs(self._folder)]:
            if path not in self._files:
                is_task = path.name == TASK_LOG
                text = LogText(path.parent.name) if is_task else RunnerText(self._begin())
                self._files[path] = _File(path, text)
        names = {path.parent.name for path in self._files}
        if "chief-0" not in names and "worker-0" in names:
            self.leader = "worker-0"
        # Yield lines before events, because a line that has the same time as an event belongs to
        # the step before it.
        for file in self._files.values():
            yield from split_times(file.lines(whole=whole), file.time)
        for raw in self._events.raw(whole=whole):
            if event := events.parse(raw):
                yield Line(time=event.time, label="", text="", event=event)

    def _begin(self) -> float:
        return next((event.time for event in events.read(self._folder / local.EVENTS)), 0.0)


class _File:
    """A file that may still grow."""

    def __init__(self, path: Path, text: LogText) -> None:
        self._path, self._text, self._position = path, text, 0

    @property
    def time(self) -> float:
        """The Unix time of the last write."""
        try:
            return os.stat(self._path).st_mtime
        except OSError:
            return time.time()

    def lines(self, *, whole: bool) -> Iterator[Line]:
        """Yield the new lines, parsed."""
        return map(self._text.take, self.raw(whole=whole))

    def raw(self, *, whole: bool) -> Iterator[str]:
        """Yield the new lines, unparsed."""
        # Yield nothing if the file was removed.
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if line.endswith(b"\n") or whole:
                    self._position += len(line)
                    yield line.decode("utf-8", "replace").rstrip("\n")
