"""The time of a line of a log: written before what a program prints, and read again.

A line of a logger has it, `2026-01-02 03:04:05,678 INFO text`, and what the user's code prints gets
the same: only so can the logs of several processes be read as one.
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
    """Writes the time before the first line of each text that begins a line."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._is_at_start = True

    def write(self, text: str) -> int:
        """Write, and flush at the end of a line: it is read while the program runs."""
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
        """Return what the stream itself has, such as its encoding."""
        return getattr(self._inner, name)


@contextmanager
def stamp_output() -> Iterator[None]:
    """Write the time before each line that is printed in the block, where no person sees it."""
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
    """Return the time of a line in seconds since 1970, None where it has none, and its text.

    The clock of the line is that of this machine, or with `utc` the one of pods.
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
