"""The standard output, standard error and log of a process: masked lines with timestamps.

Only programs whose output is a document write to the streams directly. A logger's line begins with
a timestamp, as in `2026-01-02 03:04:05,678 INFO text`. Text that the user's code prints gets a
timestamp too, so that the logs of several processes can be merged.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from datetime import UTC, datetime
from typing import IO, Any, TextIO, cast

from flotilla.trainer.runtime.masking import join_lines, mask
from flotilla.trainer.runtime.tensorflow_import import QUIET

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")
_FORMAT = warnings.formatwarning
_BREAK = re.compile(r"\r?\n(?=\S)")


def say(line: str) -> None:
    """Write a line to standard error. Ignore a closed stream."""
    try:
        sys.stderr.write(f"{join_lines(line)}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


def relay(task: str, line: str) -> None:
    """Write a line of a task to the log of the step."""
    sys.stdout.write(f"[{task}] {mask(line)}\n")
    sys.stdout.flush()


def discard(stream: IO[str]) -> None:
    """Discard all further output to a stream whose reader has closed it."""
    # Redirect the descriptor, because flushing the buffer at exit would raise the error again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def log_to_stderr() -> None:
    """Write this process's log to standard error, masked, including a final traceback.

    If another program, such as KFP, has configured logging, make its handlers mask records.
    """
    mask_libraries()
    sys.excepthook = lambda *bug: logging.critical("unhandled exception", exc_info=bug)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(QUIET)
        if not isinstance(handler.formatter, _Masked):
            handler.setFormatter(_Masked(handler.formatter or logging.Formatter()))


def mask_libraries() -> None:
    """Mask Python's warnings, and log records if logging is not configured."""
    if logging.lastResort:
        logging.lastResort.setFormatter(_Masked(logging.Formatter()))
    warnings.formatwarning = lambda *warned, **more: mask(_indent(_FORMAT(*warned, **more)))


class _Masked(logging.Formatter):
    """A formatter that masks the whole text of a record, including tracebacks.

    All lines but the first are indented, so that a quoted line is never mistaken for another record
    or an event.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        quoted = copy(record)
        quoted.msg, quoted.args = _indent(record.getMessage()), None
        if record.exc_info and record.exc_info[1]:
            quoted.exc_text = format_traceback(record.exc_info[1])
        return mask(self._inner.format(quoted))


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an error, with all lines of its message but the first indented."""
    return "".join(map(_indent, traceback.format_exception(error))).rstrip("\n")


def _indent(text: str) -> str:
    return _BREAK.sub("\n  ", text)


class _Stamped:
    """A stream that writes the time before each line."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._is_at_start = True

    def write(self, text: str) -> int:
        """Write the text. Flush at the end of a line, because other programs follow the output."""
        if self._is_at_start and text.strip():
            text_of_time = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
            self._inner.write(f"{text_of_time} ")
        self._inner.write(text)
        if text:
            self._is_at_start = text.endswith("\n")
        if self._is_at_start:
            self._inner.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped stream, such as its encoding."""
        return getattr(self._inner, name)


@contextmanager
def stamp_output() -> Iterator[None]:
    """Write the time before each line printed in the block, unless the output is a terminal."""
    before = sys.stdout
    if before is None or isinstance(before, _Stamped) or before.isatty():
        yield
        return
    sys.stdout = cast("TextIO", _Stamped(before))
    try:
        yield
    finally:
        sys.stdout = before


def split_stamp(line: str, *, utc: bool = False) -> tuple[float | None, str]:
    """Split a line into its Unix time and its text. The time is None if there is no timestamp.

    The timestamp is in local time or, with `utc`, in UTC, as in pods.
    """
    found = _STAMP.match(line)
    if not found:
        return None, line
    try:
        moment = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None, line
    moment = moment.replace(tzinfo=UTC) if utc else moment
    return moment.timestamp() + int(found[2]) / 1000, line[found.end() :]
