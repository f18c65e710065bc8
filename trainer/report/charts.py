"""The geometry of a small line chart, as plain numbers that a template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Small enough for a phone; a screen shows two in a row.
WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 28
# More points than this are not distinguishable at this width.
MOST_POINTS = 600
MARKED_POINTS = 40
# Beyond this, the grid cannot be computed or read.
_LARGEST = 1e100
# A series that falls by a larger factor is drawn on a log scale; otherwise its end would lie on the
# axis.
_MOST_LINEAR = 20.0
# An axis that begins this near to zero, as a share of its length, begins at zero.
_NEAR_ZERO = 0.25
_ROWS, _COLUMNS = 4, 5
# Flags closer than this become one flag, so that a thousand restarts stay legible.
_APART = 6.0
# Lower limit, divisor and letter of each unit prefix.
_UNITS = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k"))

Point = tuple[float, float]
Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One grid line: its position and its label."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series in the picture's coordinates; if there are few points, each is marked."""

    label: str
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """Return the points in the syntax of an SVG polyline."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)

    @property
    def marks(self) -> tuple[Point, ...]:
        """Return the points that are marked."""
        return self.points if len(self.points) <= MARKED_POINTS else ()


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Events at one place of the horizontal axis; `text` counts the events of the flag."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with its grid and lines; `is_log` says that the vertical axis is logarithmic."""

    title: str
    lines: tuple[Line, ...]
    columns: tuple[Tick, ...]
    rows: tuple[Tick, ...]
    flags: tuple[Flag, ...] = ()
    is_log: bool = False


def line_chart(  # noqa: PLR0913
    title: str,
    table: Sequence[Facts],
    across: str,
    series: Mapping[str, str],
    *,
    flags: Sequence[tuple[float, str]] = (),
    logarithmic: bool = False,
) -> Chart | None:
    """Draw the columns `series`, with their labels, over the column `across`; None without points.

    A row that lacks a number adds no point, but its place is on the axis. `flags` are texts at
    places of that axis. If `logarithmic`, values that fall far are drawn on a log scale.
    """
    found = {label: _points(table, across, name) for name, label in series.items()}
    every = [point for points in found.values() for point in points]
    if not every:
        return None
    values = [value for _, value in every]
    # This shows a series that begins late or ends early.
    places = [at for row in table if (at := number(row.get(across))) is not None]
    x_ends, columns = _fit_axis(places)
    is_log = logarithmic and min(values) > 0 and max(values) / min(values) > _MOST_LINEAR
    rows = _powers(values) if is_log else _ticks(values)
    scale: Callable[[float], float] = math.log10 if is_log else float
    bottom, top = scale(rows[0]), scale(rows[-1])

    def x_position(value: float) -> float:
        share = (value - x_ends[0]) / (x_ends[1] - x_ends[0])
        return LEFT + min(max(share, 0.0), 1.0) * (WIDTH - LEFT - RIGHT)

    def place(point: Point) -> Point:
        y = (scale(point[1]) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
        return x_position(point[0]), HEIGHT - BOTTOM - y

    return Chart(
        title=title,
        lines=tuple(
            Line(label=label, points=tuple(place(point) for point in _thin(points)))
            for label, points in found.items()
            if points
        ),
        columns=tuple(Tick(at=x_position(value), label=format_tick(value)) for value in columns),
        rows=tuple(
            Tick(at=place((x_ends[0], value))[1], label=format_tick(value)) for value in rows
        ),
        flags=_flags([(x_position(value), text) for value, text in flags]),
        is_log=is_log,
    )


def is_constant(table: Sequence[Facts], across: str, name: str) -> float | None:
    """Return the one value that a column has at all its points; None if it varies."""
    values = {value for _, value in _points(table, across, name)}
    return values.pop() if len(values) == 1 else None


def number(value: object) -> float | None:
    """Return a number that can be drawn; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def format_tick(value: float) -> str:
    """Return the label of a tick, short even for large values."""
    for least, unit, word in _UNITS:
        if least <= abs(value) < _UNITS[0][0] * 1e3:
            return f"{value / unit:g}{word}"
    return f"{value:g}".replace("e-0", "e-")


def _points(table: Sequence[Facts], across: str, name: str) -> list[Point]:
    pairs = ((number(row.get(across)), number(row.get(name))) for row in table)
    return sorted((x, y) for x, y in pairs if x is not None and y is not None)


def _thin(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and highest point of each stretch, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    width = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _spread(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high - low <= abs(high) * 1e-9:
        room = abs(high) / 2 or 0.5
        return low - room, high + room
    return low, high


def _step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next((n * power for n in (1, 2, 2.5, 5) if n * power >= least * (1 - 1e-9)), 10 * power)


def _ticks(values: Sequence[float]) -> list[float]:
    """Return at least two round values that begin below all `values` and end above them."""
    low, high = _spread(values)
    step = _step((high - low) / _ROWS)
    return _multiples(step, math.floor(low / step), math.ceil(high / step))


def _fit_axis(values: Sequence[float]) -> tuple[Point, list[float]]:
    """Return the limits of a tight axis, and the round values on it."""
    low, high = _spread(values)
    if 0 < low <= high * _NEAR_ZERO:
        low = 0.0
    step = _step((high - low) / _COLUMNS)
    room = step * 1e-6
    first, last = math.ceil((low - room) / step), math.floor((high + room) / step)
    return (low, high), _multiples(step, first, last)


def _multiples(step: float, first: int, last: int) -> list[float]:
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _powers(values: Sequence[float]) -> list[float]:
    """Return a few of the values 1, 2 and 5 times a power of ten that enclose `values`."""
    low = math.floor(math.log10(min(values)))
    high = math.ceil(math.log10(max(values)))
    every = max(math.ceil((high - low) / (_ROWS + 1)), 1)
    if every > 1:
        return [10.0**power for power in range(low, high + every, every)]
    fine = [float(f"{n}e{power}") for power in range(low, high + 1) for n in (1, 2, 5)]
    first = max(at for at, value in enumerate(fine) if value <= min(values))
    last = min(at for at, value in enumerate(fine) if value >= max(values))
    kept = fine[first : last + 1]
    return kept if len(kept) <= _ROWS + 3 else [10.0**power for power in range(low, high + 1)]


def _flags(places: Sequence[tuple[float, str]]) -> tuple[Flag, ...]:
    groups: list[tuple[float, dict[str, int]]] = []
    for at, text in sorted(places):
        if not groups or at - groups[-1][0] > _APART:
            groups.append((at, {}))
        counts = groups[-1][1]
        counts[text] = counts.get(text, 0) + 1
    return tuple(
        Flag(
            at=at,
            text=", ".join(f"{text} ({n} times)" if n > 1 else text for text, n in counts.items()),
        )
        for at, counts in groups
    )
