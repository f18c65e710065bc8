"""The one format for durations, and the time that a run spends at work."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Sixty of the smaller unit; the seconds above which tenths are dropped; the hours above which days
# are used.
_SIXTY, _TENTHS, _DAYS = 60, 10, 48
# Seconds. A longer gap between steps is idle time: the run waits to be resumed.
_IDLE = 60.0


def duration(seconds: object) -> str:
    """Return seconds as `7.3 s`, `42 s`, `2 min 08 s`, `1 h 05 min` or `2 d 7 h`; else `-`."""
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


def join_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans, each the begin and the end, across the gaps that are not idle time."""
    joined: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if joined and began - joined[-1][1] <= _IDLE:
            joined[-1] = joined[-1][0], max(joined[-1][1], ended)
        else:
            joined.append((began, ended))
    return joined


def time_at_work(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds of these spans without overlaps and without idle time."""
    return sum(ended - began for began, ended in join_spans(spans))
