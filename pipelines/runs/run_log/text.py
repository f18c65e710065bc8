"""Parses the lines of a log: time, writer, and whether they are noise."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from flotilla.trainer import events
from flotilla.trainer.events import Event
from flotilla.trainer.runtime.masking import COLOURS, printable
from flotilla.trainer.runtime.noise import is_noise
from flotilla.trainer.runtime.streams import split_stamp

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
