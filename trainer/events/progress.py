"""The progress of long work, which is counted in batches, and the format of progress and durations.

A thread reports the counts twice a second to the run's event file, which a terminal follows, or
every 30 seconds to the log if there is no such file. Work that ends before the first report is
never reported.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Self

from flotilla.trainer import events
from flotilla.trainer.events import WorkProgress
from flotilla.trainer.runtime.background import Loop

# Seconds per minute and minutes per hour, the number of seconds from which tenths are omitted, and
# the number of hours from which days are shown.
_SIXTY, _TENTHS, _DAYS = 60, 10, 48
_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def duration(seconds: object) -> str:
    """Format seconds as `7.3 s`, `2 min 08 s`, `1 h 05 min` or `2 d 7 h`, or as `-` if invalid."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return "-"
    if not 0 <= seconds < math.inf:
        return "-"
    if round(seconds, 1) < _TENTHS:
        return f"{seconds:.1f} s"
    if round(seconds) < _SIXTY:
        return f"{round(seconds)} s"
    minutes, rest = divmod(round(seconds), _SIXTY)
    if minutes < _SIXTY:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, _SIXTY)
    return f"{hours} h {minutes:02d} min" if hours < _DAYS else f"{hours // 24} d {hours % 24} h"


def join_tries(tries: Iterable[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Return the start and end of each period in which a run was working.

    A try consists of the name of a step, its start and its end. If a step is tried again, the time
    before the new try is idle, because the run was waiting to be resumed.
    """
    joined: list[tuple[float, float]] = []
    seen: set[str] = set()
    for step, began, ended in sorted(tries, key=itemgetter(1)):
        if joined and (step not in seen or began <= joined[-1][1]):
            joined[-1] = joined[-1][0], max(joined[-1][1], ended)
        else:
            joined.append((began, ended))
            # Later steps may be tried again too, but they belong to the same period.
            seen.clear()
        seen.add(step)
    return joined


def time_at_work(tries: Iterable[tuple[str, float, float]]) -> float:
    """Return the time for which a run was working, in seconds. See `join_tries`."""
    return sum(ended - began for began, ended in join_tries(tries))


def format_line(event: WorkProgress) -> str:
    """Return the progress as a log line, with the parts that are known."""
    if event.is_over:
        counts = f"{format_counts(event)} in " if event.done else ""
        return f"{event.what}: done, {counts}{duration(event.seconds)}"
    return f"{event.what}: {'  '.join(format_parts(event)) or duration(event.seconds)}"


def format_parts(event: WorkProgress) -> list[str]:
    """Return the known parts: percentage, counts, rate, remaining time and current activity."""
    found = [f"{math.floor(100 * event.share)} %"] if event.share >= 0 else []
    if event.done or event.total:
        found.append(format_counts(event))
    if event.done and event.rate > 0:
        unit, size = _scale(event.unit, event.rate)
        found.append(f"{_amount(event.rate / size)} {unit}/s")
    if event.seconds_left >= 0:
        found.append(f"{duration(event.seconds_left)} left")
    return [*found, event.detail] if event.detail else found


def format_counts(event: WorkProgress) -> str:
    """Return the completed count and the total, with their unit."""
    done, total = float(event.done), float(event.total)
    unit, size = _scale(event.unit, max(done, total))
    of = f"/{_amount(total / size)}" if total else ""
    return f"{_amount(done / size)}{of} {unit}"


def _scale(unit: str, largest: float) -> tuple[str, float]:
    if unit != "bytes":
        return unit, 1.0
    return next(each for each in _BYTES if largest >= _TENTHS * each[1] or each[1] == 1)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= _TENTHS or value == round(value) else f"{value:.1f}"


# Seconds before the first report, and between reports to the file and to the log.
QUIET_SECONDS, LIVE_SECONDS, LOG_SECONDS = 3.0, 0.5, 30.0
# Time constant of the smoothed speed, in seconds.
_SPEED_SECONDS = 10.0
# The largest displayed share of work that is not complete.
_NEARLY = 0.999


class _Speed:
    """The recent speed, without the time before the first progress."""

    def __init__(self) -> None:
        self._at = self._reached = self._sum = self._weight = 0.0

    def take(self, at: float, reached: float) -> None:
        """Record the count that was reached after this many seconds."""
        seconds, gain = at - self._at, reached - self._reached
        if seconds > 0 and (gain > 0 or self._weight):
            kept = math.exp(-seconds / _SPEED_SECONDS)
            self._sum = kept * self._sum + (1 - kept) * gain / seconds
            self._weight = kept * self._weight + 1 - kept
        self._at, self._reached = at, reached

    @property
    def value(self) -> float:
        """The count per second, or 0 without data."""
        return self._sum / self._weight if self._weight else 0.0


class Work:
    """Work of this process, as a context manager. Any thread may count the units that are done.

    If the total number of units is unknown, but the total of another measure is known, such as the
    size of the files, the share is computed from that measure.
    """

    # The time at which the last reported work ended. The next work is reported sooner if it starts
    # soon after, because both are parts of a longer operation.
    _ended_at = -math.inf

    def __init__(
        self,
        what: str,
        unit: str = "",
        total: int = 0,
        *,
        size: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the work. `total` is the number of units, and `size` their total size."""
        self._what, self._unit, self._total, self._size = what, unit, total, size
        self._clock, self._began = clock, clock()
        self._done, self._sized = 0, 0.0
        self._detail = ""
        self._speed, self._share_speed = _Speed(), _Speed()
        self._lock = threading.Lock()
        self._reported: float | None = None
        self._is_over = self._is_given_up = False
        self._loop = Loop(self.look, LIVE_SECONDS, name="progress", failing="no progress report")

    def __enter__(self) -> Self:
        """Start reporting."""
        self._loop.start()
        return self

    def __exit__(self, error: object = None, *_more: object) -> None:
        """Report the end if the work was reported. After an error, `add` raises in all threads."""
        self._loop.stop()
        with self._lock:
            self._is_over, self._is_given_up = True, error is not None
            if self._reported is not None:
                self._report(self._clock())
                Work._ended_at = self._reported

    def add(self, done: int, size: float = 0.0) -> None:
        """Add `done` completed units, which have the total size `size`.

        Raises `InterruptedError` if the work was canceled, and no caller waits for the rest.
        """
        with self._lock:
            if self._is_given_up:
                raise InterruptedError("the work was abandoned")
            self._done += done
            self._sized += size

    def reach(self, done: int, detail: str = "") -> None:
        """Set the current count, which may decrease, and what the work waits for."""
        with self._lock:
            self._done, self._detail = done, detail

    def expect(self, more: int) -> None:
        """Increase the total number of units by `more`."""
        with self._lock:
            self._total += more

    def say(self, detail: str) -> None:
        """Set the current activity, or what the work waits for."""
        self._detail = detail

    def look(self) -> None:
        """Report the progress if the interval since the last report has passed."""
        first, pause = LOG_SECONDS, LOG_SECONDS
        if os.environ.get(events.VARIABLE):
            first, pause = QUIET_SECONDS, LIVE_SECONDS
            if 0 <= self._began - Work._ended_at < QUIET_SECONDS:
                first = LIVE_SECONDS
        now = self._clock()
        with self._lock:
            self._speed.take(now - self._began, self._done)
            self._share_speed.take(now - self._began, self._share())
            due = self._began + first if self._reported is None else self._reported + pause
            if not self._is_over and now >= due:
                self._report(now)

    def _report(self, now: float) -> None:
        self._reported, seconds = now, now - self._began
        share, speed = self._share(), self._share_speed.value
        event = WorkProgress(
            what=self._what,
            unit=self._unit,
            done=self._done,
            total=self._total,
            share=round(share, 4),
            rate=round(self._speed.value, 2),
            seconds=round(seconds, 1),
            seconds_left=round((1 - share) / speed, 1) if share > 0 and speed > 0 else -1.0,
            detail=self._detail,
            is_over=self._is_over,
        )
        events.emit(event, in_log=format_line(event))

    def _share(self) -> float:
        """Return the completed share, which is 1 only if all units are done, or -1 if unknown."""
        done, whole = (self._sized, self._size) if self._size else (self._done, self._total)
        if not whole:
            return -1.0
        # The count may exceed an estimated total, and some units may never be counted.
        return min(max(done / whole, 0.0), 1.0 if self._done == self._total else _NEARLY)
