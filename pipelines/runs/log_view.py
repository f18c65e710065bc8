"""Parses the lines of logs (time, writer, noise), and selects and merges the lines to show.

`LogView` selects the lines to show, without duplicates and with fewer repeating lines.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from flotilla.components.table import TRAIN
from flotilla.trainer import events
from flotilla.trainer.events import Event, Progress, StepBegin, StepEnd
from flotilla.trainer.events.progress import (
    LINE_SECONDS,
    LogLines,
    drop_time_left,
    duration,
    format_metrics,
    format_reached,
)
from flotilla.trainer.report.wording import key_metrics, round_value
from flotilla.trainer.runtime.errors import ConfigError, nearest
from flotilla.trainer.runtime.masking import COLOURS, mask, one_line, printable
from flotilla.trainer.runtime.streams import split_stamp
from flotilla.trainer.runtime.tensorflow_import import is_noise
from flotilla.trainer.runtime.user_code import is_users_file

_EXECUTOR = re.compile(r"\[KFP Executor ([\d-]+ [\d:]+,\d{3}) ([A-Z]+)\]: ")
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
# The start of a line from a logger that is not configured.
_PLAIN_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL):[\w.]+:")
# The prefix with which the launcher relays a training task's lines into the log of its step. In a
# pod, the step adds a timestamp before it.
_TASK = re.compile(
    r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} )?\[((?:chief|worker|ps|evaluator)-\d+)\] ?"
)
_REDRAWN = re.compile(r"\r|\\u000d")
# absl's timestamp without a time zone: seconds since 1970.
_ABSL = re.compile(r"[IWEF]\d{4} 00:00:(\d{9,}\.\d+)")
# Programs, each with a pattern for the start of its noise lines. A line that ends with an opening
# bracket begins a document of several lines, which ends with the closing bracket.
PLUMBING: tuple[tuple[str, str], ...] = (
    ("kfp/dsl/executor_main.py", r"Looking for component `|Loading KFP component \""),
    ("kfp/dsl/executor_main.py", r"--component_module_path is not specified\. "),
    ("kfp/dsl/executor_main.py", r"Got executor_input:$"),
    ("kfp/dsl/executor_main.py", r"Wrote executor output file to |Did not write output file\."),
    ("backend/src/v2, in Go", r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+\.go:\d+\]"),
    ("argo executor", r"time=\S+ level=\w+ msg="),
    ("kfp/local/logging_utils.py", r"\d\d:\d\d:\d\d\.\d{3} - [A-Z]+ - |-{60,}$"),
    ("pip", r"\[notice\] |WARNING: Running pip as the 'root' user"),
)
_PLUMBING = re.compile("|".join(pattern for _, pattern in PLUMBING))
# Patterns for the first and the last line of each kind of document.
_DOCUMENTS = (
    (re.compile(r"default session config: "), re.compile(r"$")),
    (
        re.compile(r"Got executor_input:$|[IWEF]\d{4} .*\.go:\d+\].*[{\[]$"),
        re.compile(r"[}\]]\S*$"),
    ),
)
# KFP's local runner indents the output of a step, and logs the step's outputs itself.
_INDENT, _STREAMED = "    ", "Streamed logs:"
#: The end of the runner's traceback after a failed step.
RUNNER_FAILED = re.compile(r"RuntimeError: (?:Pipeline|Task) .* finished with status ")
_RUNNER = re.compile(r"(\d\d):(\d\d):(\d\d)\.(\d{3}) - [A-Z]+ - ")
_HALF_A_DAY = 43200.0
# The error line of a step. The event at the end of the step contains the same error.
_ERROR_OF_STEP = re.compile(r"flotilla: [a-z_]+: ")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a log.

    Attributes:
        time: the Unix timestamp of this or an earlier line; None if there is none.
        label: the step or training task that wrote the line; empty for the current step.
        text: the text without the timestamp.
        begins: whether the line has a timestamp and therefore begins a record.
        level: the level of the logger; empty for printed text.
        event: the event in the line, if any.
        is_noise: whether the line is irrelevant to the run.
    """

    time: float | None
    label: str
    text: str
    begins: bool = False
    level: str = ""
    event: Event | None = None
    is_noise: bool = False


class LogText:
    """Parses the text of one log, line by line."""

    def __init__(self, label: str = "", *, utc: bool = False) -> None:
        """Parse the log of the step or task `label`. With `utc`, timestamps are in UTC."""
        self._label, self._utc = label, utc
        self._time: float | None = None
        self._closes: re.Pattern[str] | None = None
        self._tasks: dict[str, LogText] = {}

    def take(self, raw: str) -> Line:
        """Parse the next line."""
        text = _plain(raw)
        if task := _TASK.match(text):
            of_task = self._tasks.setdefault(task[1], LogText(task[1], utc=self._utc))
            line = of_task.take(text[task.end() :])
            self._time = line.time or self._time
            return replace(line, time=self._time)
        # A killed process may leave a document incomplete, so a timestamp also ends a document.
        if self._closes and not (_EXECUTOR.match(text) or split_stamp(text)[0]):
            self._closes = None if self._closes.match(text) else self._closes
            return self._line(text, is_noise=True)
        return self._parse(text)

    def _parse(self, text: str) -> Line:
        begins, level = True, ""
        if found := _EXECUTOR.match(text):
            self._time, level = (
                split_stamp(f"{found[1]} ", utc=self._utc)[0] or self._time,
                found[2],
            )
            text = text[found.end() :]
        elif found := _ABSL.match(text):
            self._time = float(found[1])
        else:
            time, text = split_stamp(text, utc=self._utc)
            begins, self._time = time is not None, time or self._time
            if found := (_LEVEL.match(text) if begins else _PLAIN_LEVEL.match(text)):
                level, text = found[1], text[found.end() :]
        event = events.parse(text) if text.startswith(events.MARK) else None
        noise = is_noise(text) or _PLUMBING.match(text) is not None
        self._closes = next((end for begin, end in _DOCUMENTS if begin.match(text)), None)
        return replace(
            self._line(text, is_noise=noise), begins=begins, level=level, event=event,
        )  # fmt: skip

    def _line(self, text: str, *, is_noise: bool) -> Line:
        return Line(time=self._time, label=self._label, text=text, is_noise=is_noise)


class RunnerText(LogText):
    """Parses the log of KFP's local runner, which contains the logs of the steps."""

    def __init__(self, since: float) -> None:
        """Store when the run began, because the runner's timestamps have no date."""
        super().__init__()
        self._time = since
        self._is_of_step = self._is_output = False

    def take(self, raw: str) -> Line:
        """Parse the next line."""
        text = _plain(raw)
        is_of_step = self._is_of_step and text.startswith(_INDENT)
        if found := _RUNNER.match(text):
            self._is_of_step, self._closes = text.endswith(_STREAMED), None
            hour, minute, second, milliseconds = map(int, found.groups())
            now = datetime.fromtimestamp(self._time or 0.0).replace(
                hour=hour, minute=minute, second=second, microsecond=milliseconds * 1000
            ).timestamp()  # fmt: skip
            is_next_day = now < (self._time or 0.0) - _HALF_A_DAY
            self._time = max(now + 2 * _HALF_A_DAY * is_next_day, self._time or 0.0)
            self._is_output = text.endswith(" outputs:")
        elif self._is_output:
            self._is_output = text.startswith(_INDENT)
            return self._line(text, is_noise=True)
        line = super().take(text.removeprefix(_INDENT) if is_of_step else text)
        is_said = _ERROR_OF_STEP.match(line.text) is not None
        return replace(line, is_noise=line.is_noise or is_said)


def _plain(raw: str) -> str:
    task = _TASK.match(raw)
    # Keep only the last state of a progress bar. A launcher escapes carriage returns.
    last = _REDRAWN.split(raw.rstrip("\r\n"))[-1]
    again = task[0] if task and last != raw.rstrip("\r\n") else ""
    return printable(COLOURS.sub("", f"{again}{last}")).rstrip()


def split_times(lines: Iterable[Line], otherwise: float) -> Iterator[Line]:
    """Yield all lines. A line without a time gets the time of the next line, or `otherwise`."""
    waiting: list[Line] = []
    for line in lines:
        if line.time is None:
            waiting.append(line)
            continue
        yield from (replace(each, time=line.time) for each in waiting)
        waiting.clear()
        yield line
    yield from (replace(each, time=otherwise) for each in waiting)


# Minimum time between two lines of a kind, such as progress, as a share of the elapsed time.
_SHARE = 0.1
_FRAME = re.compile(r'( *)File "([^"]+)", line \d+')
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = "flotilla: "
_EVALUATOR = "evaluator-0"
# Number of recent lines that are searched for a repetition.
_RECENT = 200
_PACED: dict[type[Event], Callable[[Any], str]] = {
    Progress: lambda event: f"{format_reached(event)}  {format_metrics(event)}",
    events.Validation: lambda event: (
        f"validation of global step {event.global_step}: "
        + "  ".join(f"{name} {round_value(value)}" for name, value in event.metrics.items())
    ),
    events.CheckpointPublished: lambda event: f"checkpoint of global step {event.global_step}",
}
#: Training events, which do not name their task in a local run.
_OF_TRAINING = (
    *_PACED, events.AttemptBegin, events.HandedOn, events.Saved, events.UploadFailed,
    events.CheckpointPassedOver, events.WarmStart, events.FromScratch, events.TableEmpty,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line for the user: `label` is its stage or training task."""

    time: float | None
    label: str
    text: str


OnLine = Callable[[LogLine], None]


class LogView:
    """Takes the lines of a run in order, and yields the lines to show."""

    def __init__(
        self, *, stages: Sequence[str] = (), task: str = "", verbose: bool = False
    ) -> None:
        """Select the lines of `stages` and `task` (all if empty). `verbose` selects every line."""
        self.stages, self.task, self._verbose = tuple(stages), task, verbose
        # The task of training events that do not name their task.
        self.leader = ""
        self._stage = self._pod = ""
        # The current stage of each pod, because the lines of several logs may alternate.
        self._stage_in: dict[str, str] = {}
        self._begin: Line | None = None
        self._words = LogLines()
        self._paces: dict[type[Event], _Pace] = {}
        self._traceback: list[Line] = []
        self._tracebacks: set[str] = set()
        # The newest lines, each as its text and label.
        self._recent: deque[tuple[str, str]] = deque(maxlen=_RECENT)
        self._by_library = ""
        self.labels: set[str] = set()

    def require_task(self, run_id: str, tasks: Collection[str]) -> None:
        """Raise a `ConfigError` if the run has no such task."""
        if self.task and self.task not in tasks:
            known = nearest(self.task, tasks) or f" (its tasks: {', '.join(tasks) or 'none yet'})"
            raise ConfigError(f"--task: the run {run_id} has no task {self.task!r}{known}")

    def enter(self, step: str) -> None:
        """Treat the following lines as lines from the pod of a step."""
        self._pod, self._stage = step, self._stage_in.get(step, step)

    def take(self, line: Line) -> Iterator[LogLine]:
        """Process the next input line, and yield the lines to show."""
        if self._traceback and (line.begins or line.event or line.text.startswith(_ERROR)
                                or line.label != self._traceback[0].label):  # fmt: skip
            yield from self._close_traceback()
        if line.event:
            yield from self._event(line, line.event)
        elif self._verbose or not (line.is_noise or not line.text):
            yield from self._text(line)

    def flush(self) -> Iterator[LogLine]:
        """Yield lines that were held back until the next line, because none is available yet."""
        yield from self._close_traceback()
        yield from self._began()

    def end(self) -> Iterator[LogLine]:
        """Yield all lines that were held back, because the run or the log has ended."""
        yield from self.flush()
        yield from self._flush_held()

    def _text(self, line: Line) -> Iterator[LogLine]:
        if line.text.startswith(_TRACEBACK) or self._traceback:
            self._traceback.append(line)
            return
        text = line.text if self._verbose else line.text.removeprefix(_ERROR)
        if line.begins and self._was_said(line.label or self._stage, text) and not self._verbose:
            return
        if line.level in ("WARNING", "ERROR", "CRITICAL"):
            text = f"{line.level.lower()}: {text}"
            # Skip the second copy of a line that both TensorFlow's and the process's logger write.
            if line.begins and self._by_library == text and not self._verbose:
                return
            self._by_library = "" if line.begins else text
        yield from self._make_line(line, text)

    def _was_said(self, label: str, text: str) -> bool:
        """Return whether a step repeats a line of a task or of another step."""
        if _is_task(label):
            return False
        return any(each == text and by != label for each, by in self._recent)

    def _close_traceback(self) -> Iterator[LogLine]:
        """Yield a traceback unless the log of the task has already shown it."""
        lines, self._traceback = self._traceback, []
        whole = "\n".join(each.text.strip() for each in lines if each.text.strip())
        is_known = whole in self._tracebacks or RUNNER_FAILED.search(whole) is not None
        if not lines or (is_known and not self._verbose):
            return
        self._tracebacks.add(whole)
        for line in lines if self._verbose else _filter_traceback(lines):
            if line.text:
                yield from self._make_line(line, line.text)

    def _event(self, line: Line, event: Event) -> Iterator[LogLine]:
        line = replace(line, label=self._find_label(event) or line.label)
        if isinstance(event, StepBegin):
            yield from self._began()
            self._stage = self._stage_in[self._pod] = event.step
            self._begin = line
            return
        if type(event) in _PACED:
            yield from self._apply_pace(line, event)
            return
        if isinstance(event, StepEnd | events.HandedOn | events.AttemptBegin):
            yield from self._flush_held()
        if isinstance(event, StepEnd):
            self._begin = None
            if any(each and event.error.startswith(each) for each, _ in self._recent):
                # Do not repeat the error, because a task has already reported it.
                event = replace(event, error="")
        for text in _describe_event(event) or [self._words.take(event)]:
            if text and not self._was_said(line.label or self._stage, text):
                yield from self._make_line(line, text)

    def _find_label(self, event: Event) -> str:
        match event:
            case StepBegin() | StepEnd():
                return event.step
            case events.TaskFailed() | events.Restart():
                return event.task
            case events.Validation() if event.created and self.leader:
                return _EVALUATOR
        return self.leader if isinstance(event, _OF_TRAINING) else ""

    def _apply_pace(self, line: Line, event: Event) -> Iterator[LogLine]:
        if isinstance(event, Progress) and Progress not in self._paces:
            line = replace(line, event=drop_time_left(event))
        pace = self._paces.setdefault(type(event), _Pace())
        if pace.is_due(event.time) or self._verbose:
            progress = self._paces.get(Progress)
            if progress and progress.kept:
                kept, progress.kept = progress.kept, None
                yield from self._event_as_it_is(kept)
            yield from self._event_as_it_is(line)
        else:
            pace.kept = line

    def _event_as_it_is(self, line: Line) -> Iterator[LogLine]:
        if line.event:
            yield from self._make_line(line, _PACED[type(line.event)](line.event))

    def _flush_held(self) -> Iterator[LogLine]:
        """Yield the last held-back line of each kind, and reset the rate limits."""
        kept = [each.kept for each in self._paces.values() if each.kept]
        self._paces.clear()
        for line in sorted(kept, key=lambda each: each.time or 0.0):
            yield from self._event_as_it_is(line)

    def _began(self) -> Iterator[LogLine]:
        if line := self._begin:
            self._begin = None
            yield from self._make_line(line, "...")

    def _make_line(self, line: Line, text: str) -> Iterator[LogLine]:
        label = line.label or self._stage
        self.labels.add(label)
        # Show the start of a stage only before its first line. Without lines, show only its end.
        yield from self._began()
        self._recent.append((text, label))
        if self._is_selected(label):
            yield LogLine(time=line.time, label=label, text=mask(text))

    def _is_selected(self, label: str) -> bool:
        if self.task:
            return label == self.task
        return not self.stages or (TRAIN if _is_task(label) else label) in self.stages


def _filter_traceback(lines: Sequence[Line]) -> Iterator[Line]:
    """Yield a traceback with only the user's frames, or all frames if there are none."""
    parts: list[tuple[str, list[Line]]] = []
    indent = 0
    for line in lines:
        if found := _FRAME.match(line.text):
            indent = len(found[1])
            parts.append((found[2], [line]))
        elif parts and parts[-1][0] and line.text.startswith(" " * (indent + 1)):
            parts[-1][1].append(line)
        else:
            parts.append(("", [line]))
    if not any(file and is_users_file(file) for file, _ in parts):
        yield from lines
        return
    left = 0
    for file, those in [*parts, ("", [])]:
        if file and not is_users_file(file):
            left, last = left + 1, those[0]
            continue
        if left:
            frames = f"{left} frame{'s' if left > 1 else ''}"
            text = f"{' ' * indent}... {frames} outside your code (--verbose shows them)"
            yield replace(last, text=text)
            left = 0
        yield from those


def _is_task(label: str) -> bool:
    return label[-1:].isdigit()


class _Pace:
    """Limits how often lines of one kind are shown. The rate falls as the run gets longer."""

    def __init__(self) -> None:
        self._first = self._last = 0.0
        self.kept: Line | None = None

    def is_due(self, time: float) -> bool:
        """Return whether a line at this time is due."""
        self._first = self._first or time
        if self._last and time - self._last < max(LINE_SECONDS, (time - self._first) * _SHARE):
            return False
        self._last, self.kept = time, None
        return True


def _describe_event(event: Event) -> list[str]:
    """Return the lines for an event that no log contains, or [] for any other event."""
    match event:
        case events.RunBegin():
            again = f" again (start {event.number})" if event.number > 1 else ""
            return [f"run {event.run_id} begins{again}"]
        case events.Interrupted():
            return ["the run is being cancelled"]
        case events.AttemptBegin() if not event.resumed:
            epochs = f" ({event.epochs:.3g} epochs)" if event.epochs else ""
            return [f"training begins: {event.steps} steps{epochs}"]
        case events.TaskFailed():
            return [f"ended with {event.cause}"]
        case StepEnd():
            return list(_describe_end(event))
    return []


def _describe_end(event: StepEnd) -> Iterator[str]:
    cause = f": {one_line(event.error)}" if event.error else ""
    metrics = {} if cause else key_metrics(event.metrics)
    measured = ", ".join(f"{name} {text}" for name, text in metrics.items())
    more = f": {measured}" if measured else ""
    yield f"{event.status} in {duration(event.seconds)}{cause}{more}"
    if event.metrics.get("decision") == "refused":
        yield from (f"- {one_line(str(each))}" for each in event.metrics.get("reasons") or ())


def merge_lines(lines: Iterable[Line]) -> list[Line]:
    """Merge lines of several logs by time. The lines of each log remain in order."""
    return sorted(lines, key=lambda line: line.time or 0.0)
