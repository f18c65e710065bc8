"""The page of a sweep: charts of the objective by searched key, and a table of the trials."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from flotilla.trainer.report.charts import Axis, Tick, fit_axis, format_tick
from flotilla.trainer.report.report import environment
from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.sweeps.sweep import Objective, Sweep, Trial, find_best, make_table

PAGE = "sweep.html"
_TEMPLATE = Path(__file__).with_name("page.html.j2")
# Listed values are drawn on a log scale if the ratio of the largest to the smallest exceeds this.
_MOST_LINEAR = 8.0
_MOST_TICKS = 7


def render(sweep: Sweep, headline: str = "", report: str = "") -> bytes:
    """Return the page of a sweep as HTML.

    `headline` is the result of the best trial's run, and `report` the address of its report.
    """
    objective = sweep.compared_by
    ended = [each for each in sweep.trials if each.last]
    heads, rows = make_table(sweep)
    by_number = {str(each.number): each for each in sweep.trials}
    shades = _shade(ended, objective)
    values = [each.last.value for each in ended if each.last and math.isfinite(each.last.value)]
    text = _template().render(
        sweep=sweep,
        best=sweep.chosen or find_best(sweep.trials, sweep.objective),
        headline=headline,
        report=report,
        metric=objective.metric,
        better=objective.better,
        charts=[_draw(sweep, key, ended, shades) for key in sweep.keys] if shades else [],
        ends=sorted(values, key=objective.rank, reverse=True)[:: max(len(values) - 1, 1)],
        heads=heads,
        rows=[(shades.get(by_number[row[0]].number), row) for row in rows],
        values_at=len(sweep.keys) + 1,
        failed=[each for each in sweep.trials if each.error],
    )
    return mask(text).encode(errors="backslashreplace")


def _shade(trials: Sequence[Trial], objective: Objective) -> dict[int, int]:
    """Return the shade for each trial number, from 0 for the worst value to 100 for the best."""
    ranks = {each.number: objective.rank(each.last.value) for each in trials if each.last}
    known = {number: rank for number, rank in ranks.items() if math.isfinite(rank)}
    best, worst = min(known.values(), default=0.0), max(known.values(), default=0.0)
    whole = (worst - best) or 1.0
    return {number: round(100 * (worst - rank) / whole) for number, rank in known.items()}


def _draw(
    sweep: Sweep, key: str, trials: Sequence[Trial], shades: Mapping[int, int]
) -> dict[str, Any]:
    top = max((each.rung for each in trials), default=0)
    values = {each.number: each.last.value for each in trials if each.last}
    names = [each.settings.get(key, "") for each in trials if each.number in shades]
    across = _find_axis(sweep.space.get(key, ""), names)
    upward = fit_axis([values[number] for number in shades] or [0.0], is_vertical=True)
    return {
        "title": key,
        "is_log": isinstance(across, Axis) and across.is_log,
        "columns": across.ticks
        if isinstance(across, Axis)
        else [Tick(at=_place(across, each), label=each) for each in across],
        "share": 0 if isinstance(across, Axis) else 100 / len(across),
        "rows": upward.ticks,
        "dots": [
            {
                "left": _place(across, each.settings.get(key, "")),
                "bottom": upward.place(values[each.number]),
                "shade": shades[each.number],
                "trial": each,
                "is_early": each.last is not None and each.last.rung < top,
            }
            for each in trials
            if each.number in shades
        ],
    }


def _find_axis(distribution: str, names: Sequence[str]) -> Axis | list[str]:
    """Return a numeric axis for a key's values, or the values if some are not numbers."""
    numbers = [number for name in names if (number := _parse_number(name)) is not None]
    if len(numbers) < len(names) or not numbers:
        return list(dict.fromkeys(names)) or [""]
    attributes: Mapping[str, Any] = {}
    with suppress(ValueError, KeyError, TypeError):
        attributes = json.loads(distribution)["attributes"]
    ends = [attributes[name] for name in ("low", "high") if name in attributes]
    is_log = bool(attributes.get("log"))
    listed = sorted(set(numbers))
    if not ends:
        is_log = listed[0] > 0 and listed[-1] / listed[0] > _MOST_LINEAR
    axis = fit_axis([*ends, *numbers], is_log=is_log)
    if ends or len(listed) > _MOST_TICKS:
        return axis
    ticks = tuple(Tick(at=axis.place(each), label=format_tick(each)) for each in listed)
    return Axis(low=axis.low, high=axis.high, is_log=axis.is_log, ticks=ticks)


def _parse_number(text: str) -> float | None:
    with suppress(ValueError):
        return number if math.isfinite(number := float(text)) else None
    return None


def _place(across: Axis | list[str], text: str) -> float:
    if isinstance(across, Axis):
        return across.place(float(text))
    return 100 * (across.index(text) + 0.5) / len(across)


@cache
def _template() -> jinja2.Template:
    return environment(_TEMPLATE.parent).get_template(_TEMPLATE.name)
