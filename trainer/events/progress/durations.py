"""The format of durations, and the time during which a run was working."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import itemgetter

# Seconds per minute and minutes per hour, the number of seconds from which tenths are omitted, and
# the number of hours from which days are shown.
_SIXTY, _TENTHS, _DAYS = 60, 10, 48


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
