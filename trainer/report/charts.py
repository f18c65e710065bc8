"""Computes the geometry of charts, in percent of the chart area, so that templates can scale it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Maximum number of points in a line. More points cannot be distinguished at the width of the page.
MOST_POINTS = 600
MARKED_POINTS = 40
# The largest magnitude that is drawn. The grid of larger values would overflow.
_LARGEST = 1e100
# Maximum ratio of the largest to the smallest value on a linear scale. Above it, a log scale is
# used if the chart allows one.
MOST_LINEAR = 20.0
# A horizontal linear axis starts at zero if its lowest value is at most this share of its highest
# value.
_NEAR_ZERO = 0.25
_ROWS, _COLUMNS = 5, 5
# Space above and below the values, as a share of their range, so that no line touches the border.
_ROOM = 0.05
# Maximum distance, in percent, at which flags are merged. Merging keeps a chart with a thousand
# restarts legible.
_APART = 1.5
_FEWEST_TICKS, _MOST_TICKS = 2, 7
# Lower limit, divisor and suffix of each unit.
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k"))

Point = tuple[float, float]
Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A grid line with its position and label."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: its limits, scale and ticks. A vertical axis starts at the bottom."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[Tick, ...]

    def place(self, value: float) -> float:
        """Return the position of a value in percent, limited to the range 0 to 100."""
        scale: Callable[[float], float] = math.log10 if self.is_log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return 100 * min(max(share, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series. Its points are in percent of the chart area, from the top left corner."""

    label: str
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The points in the format of an SVG polyline."""
        return " ".join(f"{x:.2f},{y:.2f}" for x, y in self.points)

    @property
    def marks(self) -> tuple[Point, ...]:
        """The points that get a marker: all of them if there are few, else none."""
        return self.points if len(self.points) <= MARKED_POINTS else ()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """The events at one position of the horizontal axis. `text` describes and counts them."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with its grid and lines. `across` is the title of the horizontal axis."""

    title: str
    across: str
    lines: tuple[Line, ...]
    columns: tuple[Tick, ...]
    rows: tuple[Tick, ...]
    flags: tuple[Flag, ...] = ()
    is_log: bool = False

    @property
    def compares(self) -> bool:
        """Whether the chart compares several lines, such as training and validation."""
        return len(self.lines) > 1


def line_chart(  # noqa: PLR0913
    title: str,
    table: Sequence[Facts],
    across: str,
    series: Mapping[str, str],
    *,
    flags: Sequence[tuple[float, str]] = (),
    logarithmic: bool = False,
    named: str = "",
) -> Chart | None:
    """Return a chart of the columns `series` over the column `across`, or None if all are empty.

    A row without a number adds no point, but still extends the horizontal axis. `flags` are
    positions and texts of events, and `named` is the title of the axis. With `logarithmic`,
    positive values that vary strongly get a log scale.
    """
    found = {label: _points(table, across, name) for name, label in series.items()}
    values = [value for points in found.values() for _, value in points]
    if not values:
        return None
    # Include rows without values, so that a series that starts late or ends early stands out.
    x_axis = fit_axis([at for row in table if (at := number(row.get(across))) is not None])
    is_log = logarithmic and min(values) > 0 and max(values) / min(values) > MOST_LINEAR
    y_axis = fit_axis(values, is_log=is_log, is_vertical=True)
    lines = {
        label: tuple((x_axis.place(x), 100 - y_axis.place(y)) for x, y in _thin(points))
        for label, points in found.items()
        if points
    }
    return Chart(
        title=title,
        across=named or across,
        lines=tuple(Line(label=label, points=points) for label, points in lines.items()),
        columns=x_axis.ticks,
        rows=y_axis.ticks,
        flags=_flags([(x_axis.place(value), text) for value, text in flags]),
        is_log=is_log,
    )


def fit_axis(
    values: Sequence[float],
    *,
    is_log: bool = False,
    is_vertical: bool = False,
    is_exact: bool = False,
) -> Axis:
    """Return an axis with round ticks that covers the values.

    A horizontal linear axis starts at zero if the lowest value is close to it, unless `is_exact`. A
    vertical axis has some space at both ends.
    """
    low, high = min(values), max(values)
    if high - low <= abs(high) * 1e-9:
        room = abs(high) / 2 or 0.5
        low, high = low - room, high + room
    is_log = is_log and low > 0
    if is_vertical:
        low, high = _widen(low, high, is_log=is_log)
    elif not is_log and not is_exact and 0 < low <= high * _NEAR_ZERO:
        low = 0.0
    found = _powers(low, high) if is_log else []
    if not _FEWEST_TICKS <= len(found) <= _MOST_TICKS:
        found = _multiples(low, high, _ROWS if is_vertical else _COLUMNS)
    axis = Axis(low=low, high=high, is_log=is_log, ticks=())
    ticks = tuple(Tick(at=axis.place(value), label=format_tick(value)) for value in found)
    return replace(axis, ticks=ticks)


def is_constant(table: Sequence[Facts], across: str, name: str) -> float | None:
    """Return the value of a column if it is the same in all rows, else None."""
    values = {value for _, value in _points(table, across, name)}
    return values.pop() if len(values) == 1 else None


def number(value: object) -> float | None:
    """Return the value as a float, or None if it is not a number that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def format_tick(value: float) -> str:
    """Return the label of a tick, with a unit suffix for large values."""
    for least, unit, word in _UNITS:
        if least <= abs(value) < _UNITS[0][0] * 1e3:
            return f"{value / unit:g}{word}"
    return f"{value:g}".replace("e-0", "e-")


def _points(table: Sequence[Facts], across: str, name: str) -> list[Point]:
    pairs = ((number(row.get(across)), number(row.get(name))) for row in table)
    return sorted((x, y) for x, y in pairs if x is not None and y is not None)


def _thin(points: Sequence[Point]) -> list[Point]:
    """Thin a long line to the lowest and highest point per section, so that peaks stay visible."""
    if len(points) <= MOST_POINTS:
        return list(points)
    width = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _widen(low: float, high: float, *, is_log: bool) -> Point:
    """Add space at both ends, but do not extend an axis of nonnegative values below zero."""
    if is_log:
        room = (high / low) ** _ROOM
        return low / room, high * room
    room = (high - low) * _ROOM
    return (max(low - room, 0.0) if low >= 0 else low - room), high + room


def _multiples(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values from `low` to `high`."""
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next((n * power for n in (1, 2, 2.5, 5) if n * power >= least * (1 - 1e-9)), 10 * power)
    room = step * 1e-6
    first, last = math.ceil((low - room) / step), math.floor((high + room) / step)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Return log-scale ticks: 1, 2 and 5 times powers of ten or, if too many, only powers."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(math.ceil((last - first) / _MOST_TICKS), 1)
    fine = [float(f"{n}e{power}") for power in range(first, last + 1) for n in (1, 2, 5)]
    coarse = [float(f"1e{power}") for power in range(first, last + 1, every)]
    found = [[value for value in each if low <= value <= high] for each in (fine, coarse)]
    return found[0] if len(found[0]) <= _MOST_TICKS else found[1]


def _flags(places: Sequence[tuple[float, str]]) -> tuple[Flag, ...]:
    groups: list[tuple[float, Counter[str]]] = []
    for at, text in sorted(places):
        if not groups or at - groups[-1][0] > _APART:
            groups.append((at, Counter()))
        groups[-1][1][text] += 1
    found = ((at, (f"{t} ({n} times)" if n > 1 else t for t, n in c.items())) for at, c in groups)
    return tuple(Flag(at=at, text=", ".join(texts)) for at, texts in found)
