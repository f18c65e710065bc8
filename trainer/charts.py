"""The geometry of a small line chart, as plain figures that a template can draw as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Small enough for a phone; beside each other on a screen.
WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 28
# More points than this are not told apart at this width.
MOST_POINTS = 600
MARKED_POINTS = 40
# Beyond this the grid cannot be computed, and nobody can read it.
_LARGEST = 1e100

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One line of the grid: where it stands, and its label."""

    at: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series in the picture's coordinates; few points are marked one by one."""

    label: str
    points: tuple[Point, ...]

    @property
    def path(self) -> str:
        """The points as an SVG polyline wants them."""
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)

    @property
    def marks(self) -> tuple[Point, ...]:
        """The points that are marked."""
        return self.points if len(self.points) <= MARKED_POINTS else ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart with its grid and lines."""

    title: str
    lines: tuple[Line, ...]
    columns: tuple[Tick, ...]
    rows: tuple[Tick, ...]


def line_chart(
    title: str, table: Sequence[Mapping[str, Any]], across: str, series: Mapping[str, str]
) -> Chart | None:
    """Draw columns of a table over another one.

    Args:
        title: what the chart shows.
        table: rows; one that lacks a column, or holds no finite number there, adds no point.
        across: the column of the horizontal axis.
        series: the columns that are drawn, with their labels.

    Returns:
        The chart, or None where there is not one point.
    """
    found = {label: _points(table, across, name) for name, label in series.items()}
    every = [point for points in found.values() for point in points]
    if not every:
        return None
    columns = _ticks([x for x, _ in every])
    rows = _ticks([y for _, y in every])

    def place(point: Point) -> Point:
        x = _share(point[0], columns) * (WIDTH - LEFT - RIGHT)
        y = _share(point[1], rows) * (HEIGHT - TOP - BOTTOM)
        return LEFT + x, HEIGHT - BOTTOM - y

    return Chart(
        title=title,
        lines=tuple(
            Line(label=label, points=tuple(place(point) for point in _thinned(points)))
            for label, points in found.items()
            if points
        ),
        columns=tuple(Tick(at=place((value, rows[0]))[0], label=f"{value:g}") for value in columns),
        rows=tuple(Tick(at=place((columns[0], value))[1], label=f"{value:g}") for value in rows),
    )


def _points(table: Sequence[Mapping[str, Any]], across: str, name: str) -> list[Point]:
    pairs = ((_number(row.get(across)), _number(row.get(name))) for row in table)
    return sorted((x, y) for x, y in pairs if x is not None and y is not None)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and the highest point of each stretch, so that no peak is lost."""
    if len(points) <= MOST_POINTS:
        return list(points)
    width = math.ceil(2 * len(points) / MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round values, at least two, that begin below all `values` and end above."""
    low, high = min(values), max(values)
    if high - low <= abs(high) * 1e-9:
        room = abs(high) / 2 or 0.5
        low, high = low - room, high + room
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next((n * power for n in (1, 2, 5) if n * power >= step), 10 * power)


def _share(value: float, ticks: Sequence[float]) -> float:
    return (value - ticks[0]) / (ticks[-1] - ticks[0])
