"""The logs of a local run: its events, and the output of its steps and tasks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.components.table import TRAIN, name_step_of
from flotilla.pipelines.runs import local, local_status
from flotilla.pipelines.runs.run_log.text import Line, LogText, RunnerText, split_times
from flotilla.pipelines.runs.run_log.view import LogLine, LogView, merge_lines
from flotilla.trainer import events
from flotilla.trainer.cluster.process import LOG as TASK_LOG
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.user_code import innermost_frame

CLUSTER = "cluster"
OnLine = Callable[[LogLine], None]


def follow_logs(folder: Path, view: LogView, *, follow: bool = False, on_line: OnLine) -> None:
    """Pass a run's logs to `on_line`. With `follow`, continue until it ends. Raises `UserError`."""
    if not any((folder / name).is_file() for name in (local.EVENTS, local_status.LOG)):
        raise UserError(f"cannot read {folder / local_status.LOG}: the run has written nothing")
    tasks = [path.parent.name for path in _task_logs(folder)]
    if tasks or not follow:
        view.require_task(folder.name, tasks)
    logs = _Logs(folder)
    while True:
        # Check for the end of the run before reading, so that its last lines are read too.
        going = follow and local_status.find_process(folder) > 0
        lines = merge_lines(logs.read(whole=not going))
        view.leader = logs.leader
        for line in lines:
            for each in view.take(line):
                on_line(each)
        for each in view.flush() if going else view.end():
            on_line(each)
        if not going:
            return
        time.sleep(local_status.LOOK_SECONDS)


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
    log = Path(failed.log) if is_training and failed and failed.log else folder / local_status.LOG
    return Failure(step=name_step_of(ends[0].step), log=log, frame=innermost_frame(trace))


def _task_logs(folder: Path) -> list[Path]:
    return sorted((folder / CLUSTER).glob(f"*/{TASK_LOG}"))


class _Logs:
    """Reads new lines from the files of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._events = _File(folder / local.EVENTS, LogText())
        self.leader = "chief-0"

    def read(self, *, whole: bool) -> Iterator[Line]:
        """Yield the new lines of all files. With `whole`, also yield an incomplete last line."""
        for path in [self._folder / local_status.LOG, *_task_logs(self._folder)]:
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
