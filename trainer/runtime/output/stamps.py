"""Timestamps of log lines, which are written before printed text and parsed later.

A logger's line begins with a timestamp, as in `2026-01-02 03:04:05,678 INFO text`. Text that the
user's code prints gets a timestamp too, so that the logs of several processes can be merged.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO, cast

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ")


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
