"""Formats the progress of work as text."""

from __future__ import annotations

import math

from flotilla.trainer.events import WorkProgress
from flotilla.trainer.events.progress.durations import duration

_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_TENTHS = 10


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
