"""The page of a sweep: its trials by metric, parallel coordinates, the command of the best.

One HTML file without a script and without an address on the network; its charts are SVG.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from trainer.report import pages
from trainer.sweeps.state import Sweep
from trainer.sweeps.trial import DONE, FAILED, Trial, best_of

PAGE = "sweep.html"
WIDTH, HEIGHT, TOP, BOTTOM, SIDE = 960, 330, 44, 34, 90
# A parameter whose values differ by more than this factor is drawn by magnitude.
_BY_MAGNITUDE = 30
_MOST_LABELS = 6
_LETTERS = 18


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of parallel coordinates: its name, where it stands and its labels from the top."""

    name: str
    x: float
    labels: tuple[tuple[float, str], ...]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The line of one trial; `kind` is `best`, `other` or `failed`."""

    number: int
    kind: str
    points: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One trial of the table; `at` is its place from the worst (0) to the best (100)."""

    trial: Trial
    place: int
    is_best: bool
    value: float | None
    steps: int
    at: float | None


def write(sweep: Sweep, path: Path) -> None:
    """Write the page; raises `OSError`."""
    path.write_text(render(sweep), encoding="utf-8")


def render(sweep: Sweep) -> str:
    """Return the page as HTML; all that the sweep says is escaped."""
    axes, lines = coordinates(sweep)
    count = dict.fromkeys((DONE, FAILED), 0)
    for each in sweep.trials:
        count[each.status] = count.get(each.status, 0) + 1
    return _template().render(
        sweep=sweep,
        rows=rows_of(sweep),
        axes=axes,
        lines=lines,
        progress=rung_lines(sweep),
        count=count,
        seconds=sum(each.seconds for each in sweep.trials),
        command=sweep.command(),
        verdict=sweep.verdict or "running",
        size={"width": WIDTH, "height": HEIGHT, "top": TOP, "bottom": HEIGHT - BOTTOM},
    )


def rows_of(sweep: Sweep) -> list[Row]:
    """Return the trials, the best first; what reached a higher rung is above the others."""
    objective = sweep.objective

    def order(trial: Trial) -> tuple[int, float, int]:
        last = trial.last
        value = objective.rank(last.value) if last else math.inf
        return (-last.rung if last else 1, value, trial.number)

    best = sweep.best or getattr(best_of(sweep.trials, objective), "number", 0)
    ranks = [objective.rank(each.last.value) for each in sweep.trials if each.last]
    low, high = min(ranks, default=0.0), max(ranks, default=0.0)
    rows = []
    for place, trial in enumerate(sorted(sweep.trials, key=order), start=1):
        value = trial.last.value if trial.last else None
        at = None
        if value is not None:
            at = 100.0 if high == low else 100 * (high - objective.rank(value)) / (high - low)
        rows.append(
            Row(
                trial=trial,
                place=place,
                is_best=trial.number == best,
                value=value,
                steps=trial.last.steps if trial.last else 0,
                at=at,
            )
        )
    return rows


def coordinates(sweep: Sweep) -> tuple[list[Axis], list[Trace]]:
    """Return the axes of parallel coordinates, the metric last, and a line a trial."""
    # Drawn last is on top: what failed over what did not, and the best over all.
    trials = sorted(sweep.trials, key=lambda x: (x.number == sweep.best, x.last is None))
    columns: dict[str, list[Any]] = {
        key: [_number(each.settings.get(key, "")) for each in trials] for key in sweep.keys
    }
    columns[sweep.objective.metric] = [each.last.value if each.last else None for each in trials]
    gap = (WIDTH - 2 * SIDE) / max(len(columns) - 1, 1)
    axes, places = [], []
    for number, (name, values) in enumerate(columns.items()):
        x = SIDE + number * gap
        at, labels = _scale(values, is_measured=name == sweep.objective.metric)
        axes.append(Axis(name=name, x=x, labels=labels))
        places.append([(x, at[index]) for index in range(len(trials))])
    lines = []
    for index, trial in enumerate(trials):
        points = [(x, y) for x, y in (column[index] for column in places) if y is not None]
        kind = "best" if trial.number == sweep.best else "other"
        lines.append(
            Trace(
                number=trial.number,
                kind=kind if trial.last else "failed",
                points=_joined(points),
                title=f"trial {trial.number}: {_said(trial.settings)}",
            )
        )
    return axes, [each for each in lines if each.points]


def rung_lines(sweep: Sweep) -> dict[str, Any]:
    """Return the metric of each trial over the steps of its rungs; empty without rungs."""
    found = [each for each in sweep.trials if each.results]
    if len(sweep.rungs) == 1 or not found:
        return {}
    gap = (WIDTH - 2 * SIDE) / (len(sweep.rungs) - 1)
    values = [result.value for each in found for result in each.results]
    at, labels = _scale(values, is_measured=True)
    height = {value: y for value, y in zip(values, at, strict=True) if y is not None}
    drawn = [
        Trace(
            number=each.number,
            kind="best" if each.number == sweep.best else "other",
            points=_joined(
                [(SIDE + result.rung * gap, height[result.value]) for result in each.results]
            ),
            title=f"trial {each.number}: {_said(each.settings)}",
        )
        for each in sorted(found, key=lambda each: each.number == sweep.best)
    ]
    columns = [(SIDE + rung * gap, f"{steps:,}") for rung, steps in enumerate(sweep.rungs)]
    return {"lines": drawn, "rows": labels, "columns": columns}


def _scale(
    values: Sequence[Any], *, is_measured: bool
) -> tuple[list[float | None], tuple[tuple[float, str], ...]]:
    """Return the height of each value, None for none, and the labels of the axis."""
    known = [each for each in values if each is not None]
    is_number = all(isinstance(each, float) for each in known)
    # Few numbers are names: at equal distances none covers another.
    if is_number and (is_measured or len(set(known)) > _MOST_LABELS):
        return _by_number(values, known)
    words = [f"{each:g}" if is_number else str(each) for each in sorted(set(known), key=_order)]
    heights = {word: _height(_share(index, len(words))) for index, word in enumerate(words)}
    return (
        [
            None if each is None else heights[f"{each:g}" if is_number else str(each)]
            for each in values
        ],
        tuple((at, _short(word)) for word, at in _thinned(heights.items())),
    )


def _by_number(
    values: Sequence[float | None], known: Sequence[float]
) -> tuple[list[float | None], tuple[tuple[float, str], ...]]:
    low, high = min(known, default=0.0), max(known, default=1.0)
    is_log = low > 0 and high / low >= _BY_MAGNITUDE

    def share(value: float) -> float:
        if high == low:
            return 0.5
        if is_log:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    return (
        [None if each is None else _height(share(each)) for each in values],
        tuple((_height(share(each)), f"{each:.4g}") for each in sorted({low, high})),
    )


def _order(value: float | str) -> tuple[bool, float, str]:
    """Order numbers before words."""
    is_word = isinstance(value, str)
    return is_word, 0.0 if isinstance(value, str) else value, str(value)


def _share(index: int, count: int) -> float:
    return 0.5 if count == 1 else index / (count - 1)


def _height(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)


def _thinned(labels: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    every = list(labels)
    width = math.ceil(len(every) / (2 * _MOST_LABELS))
    return every[:: max(width, 1)]


def _number(text: str) -> float | str | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _joined(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _said(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


@cache
def _template() -> jinja2.Template:
    made = pages.environment(Path(__file__).parent)
    made.filters["last_part"] = lambda key: str(key).rpartition(".")[2].replace("_", " ")
    return made.get_template("sweep.html.j2")
