"""What an evaluation and the events of a run look like on the page: plain data for the template.

The geometry of a small line chart, as plain numbers that a template can draw as SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Small enough for a phone; two in a row on a screen.
WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 12, 28
# More points than this are not distinguishable at this width.
MOST_POINTS = 600
MARKED_POINTS = 40
# Beyond this the grid cannot be computed, and nobody can read it.
_LARGEST = 1e100

PUBLISHED = "checkpoint_published"

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """One line of the grid: where it is, and its label."""

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
    """Draw the columns `series`, with their labels, over the column `across`.

    A row that lacks a column, or holds no finite number there, adds no point. None where there is
    not one point.
    """
    found = {label: _points(table, across, name) for name, label in series.items()}
    every = [point for points in found.values() for point in points]
    if not every:
        return None
    columns, rows = (_ticks(values) for values in zip(*every, strict=True))

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
    least = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(least))
    step = next((n * power for n in (1, 2, 5) if n * power >= least), 10 * power)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def _share(value: float, ticks: Sequence[float]) -> float:
    return (value - ticks[0]) / (ticks[-1] - ticks[0])


# A matrix of more classes is a table that nobody reads; its largest confusions are listed instead.
MOST_CLASSES = 20
_MOST_CONFUSIONS = 10
_MOST_CURVES = 3
_MOST_PARTS = 12
_MOST_TILES = 4
_VALIDATION = "validation_"
_DARKEST = 55

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the confusion matrix: how many, and how dark in percent."""

    count: int
    shade: int
    right: bool


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One step on the time line: where it begins, and how long it is, in percent of the run."""

    step: str
    status: str
    seconds: float
    left: float
    width: float
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event at one moment; `kind` is `checkpoint` or `incident`."""

    left: float
    kind: str
    text: str


def matrix(evaluation: Facts) -> list[list[Cell]]:
    """Return the confusion matrix as cells; none where there are too many classes."""
    rows = evaluation.get("confusion_matrix") or []
    if len(rows) > MOST_CLASSES:
        return []
    return [
        [
            Cell(
                count=count,
                # The root shows one wrong example in a thousand.
                shade=round(_DARKEST * math.sqrt(count / max(sum(row), 1))),
                right=true == guess,
            )
            for guess, count in enumerate(row)
        ]
        for true, row in enumerate(rows)
    ]


def confusions(evaluation: Facts) -> list[dict[str, Any]]:
    """Return the most frequent confusions: `true`, `predicted`, `count`."""
    labels = evaluation.get("labels") or []
    found = [
        {"true": labels[true], "predicted": labels[guess], "count": count}
        for true, row in enumerate(evaluation.get("confusion_matrix") or [])
        for guess, count in enumerate(row)
        if count and true != guess
    ]
    return sorted(found, key=lambda each: -each["count"])[:_MOST_CONFUSIONS]


def weak_classes(evaluation: Facts) -> list[Facts]:
    """Return the metrics of each class, the lowest F1 first; of many classes the weakest."""
    rows = evaluation.get("per_class") or ()
    return sorted(rows, key=lambda row: row["f1"])[:MOST_CLASSES]


def curves(evaluation: Facts, found: Sequence[Facts]) -> list[Chart]:
    """Return ROC and precision over recall, of the weakest classes where their areas are known."""
    areas = {row["label"]: row for row in evaluation.get("per_class") or ()}
    charts: list[Chart | None] = []
    for title, curve, area in (
        ("ROC: true over false positive rate", "roc", "auc"),
        ("Precision over recall", "pr", "pr_auc"),
    ):
        known = [
            (areas[each["label"]][area], each)
            for each in found
            if areas.get(each["label"], {}).get(area) is not None
        ]
        known.sort(key=lambda pair: pair[0])
        named = [(f"{each['label']} (area {value:.4f})", each[curve]) for value, each in known]
        if not areas:
            named = [(each["label"], each[curve]) for each in found]
        charts.append(_of_points(title, dict(named[:_MOST_CURVES])))
    return [chart for chart in charts if chart]


def charts(evaluation: Facts) -> list[Chart]:
    """Return the charts that the task has asked for."""
    found = (
        _of_points(f"{each['title']}: {each['y']} over {each['x']}", each["series"])
        for each in evaluation.get("charts") or ()
    )
    return [chart for chart in found if chart]


def _of_points(title: str, series: Mapping[str, Sequence[Sequence[Any]]]) -> Chart | None:
    """Draw series of points [x, y] by their labels."""
    table = [
        {"across": x, str(number): y}
        for number, points in enumerate(series.values())
        for x, y in points
    ]
    return line_chart(title, table, "across", {str(n): label for n, label in enumerate(series)})


def calibration(evaluation: Facts) -> Chart | None:
    """Return how often the model is right where it says how sure it is."""
    bins = evaluation.get("calibration") or ()
    if not bins:
        return None
    table = [{"across": each["confidence"], "found": each["accuracy"]} for each in bins]
    table += [{"across": end, "ideal": end} for end in (0.0, 1.0)]
    series = {"found": "accuracy", "ideal": "as sure as right"}
    return line_chart("Calibration: accuracy over confidence", table, "across", series)


def main_metric(evaluation: Facts) -> str:
    """Return the metric by which models and parts are compared."""
    # An evaluation of an earlier version is a classifier's: its accuracy comes after its loss.
    others = (name for name in evaluation.get("metrics") or {} if name != "loss")
    return str(evaluation.get("main_metric") or next(others, "loss"))


def weakest(evaluation: Facts, rows: Sequence[Facts]) -> list[dict[str, Any]]:
    """Return parts of a slice, the worst first: `value`, `examples`, `metric`, `interval`.

    `metric` is the value of the main metric; a part that does not define it is left out.
    """
    name = main_metric(evaluation)
    lower = (evaluation.get("directions") or {}).get(name, "higher") == "lower" or name == "loss"
    found = [
        {
            "value": row["value"],
            "examples": row["examples"],
            "metric": row["metrics"][name],
            "interval": row.get("intervals", {}).get(name),
        }
        for row in rows
        if row["metrics"].get(name) is not None
    ]
    return sorted(found, key=lambda row: row["metric"], reverse=lower)[:_MOST_PARTS]


def weak_parts(evaluation: Facts) -> list[dict[str, Any]]:
    """Return the parts of every slice, the weakest first: `slice`, `rows`."""
    slices = evaluation.get("slices") or {}
    found = [{"slice": name, "rows": weakest(evaluation, rows)} for name, rows in slices.items()]
    return [each for each in found if each["rows"]]


def tiles(evaluation: Facts, rows: Sequence[Facts]) -> list[Facts]:
    """Return the metrics that are at the top: the main one, the loss, and the next ones."""
    first = (main_metric({**evaluation, "metrics": {row["name"]: 0 for row in rows}}), "loss")
    known = [row for name in first for row in rows if row["name"] == name]
    known += [row for row in rows if row["name"] not in first]
    return known[:_MOST_TILES]


def training(history: Sequence[Facts]) -> dict[str, dict[str, str]]:
    """Return the metrics of a history: by name its columns, with what they were measured on."""
    columns = dict.fromkeys(name for row in history for name in row)
    names = [name.removeprefix(_VALIDATION) for name in columns if name.startswith(_VALIDATION)]
    names = ["loss", *(name for name in names if name != "loss")][:_MOST_PARTS]
    return {name: {name: "training", f"{_VALIDATION}{name}": "validation"} for name in names}


def metric_rows(evaluation: Facts, metrics: Facts) -> list[dict[str, Any]]:
    """Return every metric with its interval: `name`, `value`, `interval`."""
    intervals = evaluation.get("intervals") or {}
    return [
        {"name": name, "value": value, "interval": intervals.get(name)}
        for name, value in metrics.items()
    ]


def time_line(tries: Sequence[Facts], events: Sequence[Facts]) -> list[Bar]:
    """Return the steps as bars over the time of the run, each with the events of its time.

    `tries` have the time at which they `began`, and `seconds`; `events` have a `time`.
    """
    numbers = ("began", "seconds")
    timed = [each for each in tries if None not in (_number(each.get(name)) for name in numbers)]
    if not timed:
        return []
    begin: float = min(each["began"] for each in timed)
    whole: float = max(max(each["began"] + each["seconds"] for each in timed) - begin, 1e-3)

    def share(moment: float) -> float:
        return round(min(max(100 * (moment - begin) / whole, 0.0), 100.0), 2)

    marks = {each["began"]: list[Mark]() for each in timed}
    for event in events:
        if (moment := _number(event.get("time"))) is not None:
            kind = "checkpoint" if event.get("event") == PUBLISHED else "incident"
            text = f"{event.get('event')} after {moment - begin:.1f} s"
            began = max((each for each in marks if each <= moment), default=min(marks))
            marks[began].append(Mark(left=share(moment), kind=kind, text=text))
    return [
        Bar(
            step=str(each.get("step")),
            status=str(each.get("status")),
            seconds=each["seconds"],
            left=share(each["began"]),
            width=round(max(share(each["began"] + each["seconds"]) - share(each["began"]), 0.5), 2),
            marks=tuple(marks[each["began"]]),
        )
        for each in timed
    ]
