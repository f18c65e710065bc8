"""The one format for durations."""

from __future__ import annotations

import math

# Sixty of the smaller unit; the seconds above which tenths are dropped; the hours above which days
# are used.
_SIXTY, _TENTHS, _DAYS = 60, 10, 48


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
