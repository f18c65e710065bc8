"""Converts an evaluation and the events of a run to the data that the report template renders."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flotilla.trainer.config.main_metric import LOSS, VALIDATION, MainMetric, main_first
from flotilla.trainer.events.progress import duration, join_tries
from flotilla.trainer.report import headline
from flotilla.trainer.report.charts import Chart, line_chart, number
from flotilla.trainer.report.wording import capital, shorten_name, side_by_side, title_metric
from flotilla.trainer.runtime.masking import one_line

PUBLISHED, ATTEMPT = "checkpoint_published", "attempt_begin"
# Maximum number of classes in a confusion matrix. If there are more, only the most frequent
# confusions are listed.
MOST_CLASSES = 20
_MOST_CONFUSIONS = 10
_MOST_CURVES = 3
_MOST_PARTS = 12
_MOST_TILES = 4
_ACROSS = {"roc": "false positive rate", "pr": "recall"}
_DARKEST = 55
_MOST_COLUMNS = 12
# Resolution of the timeline, in percent of the run.
_MARK_APART = 0.25
_CALLED = {
    "restart": "restart", "task_failed": "a task was lost",
    "suspension": "suspended", "stalled": "stalled", "evaluator_left": "evaluator left",
    "checkpoint_passed_over": "checkpoint skipped", "servers_lost": "a server was lost",
}  # fmt: skip

Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the confusion matrix. The shade is in percent."""

    count: int
    shade: int
    right: bool


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One step on the timeline. Its start and length are in percent of the run."""

    step: str
    status: str
    seconds: float
    left: float
    width: float
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Events of one `kind` at one place on the timeline. `text` describes the first event."""

    left: float
    kind: str
    text: str
    count: int = 1


def matrix(evaluation: Facts) -> list[list[Cell]]:
    """Return the cells of the confusion matrix, or an empty list if there are too many classes."""
    rows = evaluation.get("confusion_matrix") or []
    if len(rows) > MOST_CLASSES:
        return []
    return [
        [
            Cell(
                count=count,
                # The square root makes even one error in a thousand visible.
                shade=round(_DARKEST * math.sqrt(count / max(sum(row), 1))),
                right=true == guess,
            )
            for guess, count in enumerate(row)
        ]
        for true, row in enumerate(rows)
    ]


def confusions(evaluation: Facts) -> list[dict[str, Any]]:
    """Return the most frequent confusions, each as `true`, `predicted` and `count`."""
    labels = evaluation.get("labels") or []
    found = [
        {"true": labels[true], "predicted": labels[guess], "count": count}
        for true, row in enumerate(evaluation.get("confusion_matrix") or [])
        for guess, count in enumerate(row)
        if count and true != guess
    ]
    return sorted(found, key=lambda each: -each["count"])[:_MOST_CONFUSIONS]


def weak_classes(evaluation: Facts) -> list[Facts]:
    """Return the metrics of the classes with the lowest F1, lowest first."""
    rows = evaluation.get("per_class") or ()
    return sorted(rows, key=lambda row: row["f1"])[:MOST_CLASSES]


def curves(evaluation: Facts, found: Sequence[Facts]) -> list[Chart]:
    """Return the ROC and precision-recall curves of the few classes with the smallest areas."""
    areas = {row["label"]: row for row in evaluation.get("per_class") or ()}
    charts: list[Chart | None] = []
    for title, curve, area in (
        ("ROC: true positive rate", "roc", "auc"),
        ("Precision", "pr", "average_precision"),
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
        charts.append(_points_chart(title, dict(named[:_MOST_CURVES]), _ACROSS[curve]))
    return [chart for chart in charts if chart]


def charts(evaluation: Facts) -> list[Chart]:
    """Return the charts that the task adds to its evaluation."""
    found = (
        _points_chart(f"{each['title']}: {each['y']}", each["series"], str(each["x"]))
        for each in evaluation.get("charts") or ()
    )
    return [chart for chart in found if chart]


def _points_chart(
    title: str, series: Mapping[str, Sequence[Sequence[Any]]], named: str
) -> Chart | None:
    table = [
        {"across": x, str(place): y}
        for place, points in enumerate(series.values())
        for x, y in points
    ]
    columns = {str(n): label for n, label in enumerate(series)}
    return line_chart(title, table, "across", columns, named=named)


def calibration(evaluation: Facts) -> Chart | None:
    """Return the reliability diagram (accuracy by confidence), or None without calibration data."""
    bins = evaluation.get("calibration") or ()
    if not bins:
        return None
    table = [{"across": each["confidence"], "found": each["accuracy"]} for each in bins]
    table += [{"across": end, "ideal": end} for end in (0.0, 1.0)]
    series = {"found": "accuracy", "ideal": "perfectly calibrated"}
    return line_chart("Calibration: accuracy", table, "across", series, named="confidence")


def weakest(evaluation: Facts, rows: Sequence[Facts]) -> list[dict[str, Any]]:
    """Return the parts of one slice with the worst main metric, worst first."""
    main = MainMetric.of(evaluation)
    found = [
        {
            "value": row["value"],
            "examples": row["examples"],
            "metric": row["metrics"][main.name],
            "interval": row.get("intervals", {}).get(main.name),
        }
        for row in rows
        if row["metrics"].get(main.name) is not None
    ]
    return sorted(found, key=lambda row: -main.rank(row["metric"]))[:_MOST_PARTS]


def weak_parts(evaluation: Facts) -> list[dict[str, Any]]:
    """Return the weakest parts of each slice, as `slice` and `rows`."""
    slices = evaluation.get("slices") or {}
    found = {name: weakest(evaluation, rows) for name, rows in slices.items()}
    return [{"slice": name, "rows": rows} for name, rows in found.items() if rows]


def tiles(evaluation: Facts, rows: Sequence[Facts]) -> list[Facts]:
    """Return the metrics for the top of the page, starting with the main metric and the loss."""
    named = {row["name"]: row for row in rows}
    main = MainMetric.of({**evaluation, "metrics": named})
    return [*main_first(named, main.name).values()][:_MOST_TILES]


def training(history: Sequence[Facts], main: str) -> dict[str, dict[str, str]]:
    """Return the history columns of each metric, with the split that each column belongs to."""
    columns = dict.fromkeys(name for row in history for name in row)
    names = [name.removeprefix(VALIDATION) for name in columns if name.startswith(VALIDATION)]
    names = [*main_first(dict.fromkeys([LOSS, *names]), main)][:_MOST_PARTS]
    return {name: {name: "training", f"{VALIDATION}{name}": "validation"} for name in names}


def remarks(evaluation: Facts) -> list[str]:
    """Return remarks about the positive classes, the constant and the baselines."""
    found = headline.positive_classes(evaluation)
    if answer := (evaluation.get("constant") or {}).get("answer"):
        found.append(f"Constant: {shorten_name(answer)}.")
    for each in evaluation.get("baselines") or ():
        skipped = f" was skipped: {one_line(str(each['skipped']))}" if each.get("skipped") else ""
        found.append(f"{capital(headline.describe_baseline(each))}{skipped}.")
    return found


def metric_rows(evaluation: Facts, metrics: Facts) -> list[dict[str, Any]]:
    """Return each metric with its interval and the values of all opponents.

    A row has `name`, `interval`, `cells` (the formatted values of the model and its opponents, each
    with a flag that marks the best one) and `comparisons` (with the champion and the constant).
    """
    intervals, others = evaluation.get("intervals") or {}, headline.opponents(evaluation)
    rows = []
    for name, value in metrics.items():
        better = MainMetric.of({**evaluation, "metrics": metrics, "main_metric": name}).better
        values = [value, *(each.get(name) for each in others.values())]
        found = headline.describe_metric({**evaluation, "metrics": metrics, "main_metric": name})
        rows.append({
            "name": name,
            "interval": intervals.get(name),
            "cells": side_by_side(values, intervals.get(name), better),
            "comparisons": headline.comparisons(found),
        })  # fmt: skip
    return rows


def time_line(tries: Sequence[Facts], events: Sequence[Facts]) -> tuple[list[Bar], float]:
    """Return the steps as bars over the active time of the run, and the idle time in seconds.

    Each bar shows one try of a step and the events during this try. The tries of a step are
    numbered if there is more than one. Idle time between the tries is left out.
    """
    spans = list_spans(tries)
    if not spans:
        return [], 0.0
    joined = join_tries(spans)
    whole = max(_work_until(math.inf, joined), 1e-3)

    def share(moment: float) -> float:
        return round(100 * _work_until(moment, joined) / whole, 2)

    timed = [each for each in tries if list_spans([each])]
    names = [str(each.get("step")) for each in timed]
    marks: dict[float, dict[tuple[float, str], Mark]] = {each["began"]: {} for each in timed}
    for event in events:
        if (moment := number(event.get("time"))) is not None:
            kind = "checkpoint" if event.get("event") == PUBLISHED else "incident"
            text = f"{event.get('event')} after {duration(_work_until(moment, joined))}"
            began = max((each for each in marks if each <= moment), default=min(marks))
            # Merge marks, so that a thousand restarts stay legible.
            place = round(share(moment) / _MARK_APART) * _MARK_APART, kind
            first = marks[began].get(place)
            marks[began][place] = (
                replace(first, count=first.count + 1)
                if first
                else Mark(left=share(moment), kind=kind, text=text)
            )
    bars = [
        Bar(
            step=f"{name}, try {names[: at + 1].count(name)}" if names.count(name) > 1 else name,
            status=str(each.get("status")),
            seconds=each["seconds"],
            left=share(each["began"]),
            width=round(max(share(each["began"] + each["seconds"]) - share(each["began"]), 0.5), 2),
            marks=tuple(marks[each["began"]].values()),
        )
        for at, (each, name) in enumerate(zip(timed, names, strict=True))
    ]
    return bars, joined[-1][1] - joined[0][0] - whole


def list_spans(tries: Iterable[Facts]) -> list[tuple[str, float, float]]:
    """Return the step, start and end of each try whose times are known."""
    return [
        (str(each.get("step")), began, began + seconds)
        for each in tries
        if (began := number(each.get("began"))) is not None
        and (seconds := number(each.get("seconds"))) is not None
    ]


def _work_until(moment: float, joined: Sequence[tuple[float, float]]) -> float:
    return sum(min(max(moment, began), ended) - began for began, ended in joined)


def flags(incidents: Sequence[Facts], checkpoints: Sequence[Facts]) -> list[tuple[float, str]]:
    """Return the position of each incident, as a global step, and the incident's name.

    An unknown position is interpolated from the time of the incident.
    """
    known = sorted(
        (time, step)
        for each in (*checkpoints, *incidents)
        if (time := number(each.get("time"))) is not None
        and (step := number(each.get("global_step"))) is not None
    )
    found, attempt = [], 1
    for each in incidents:
        kind = str(each.get("event"))
        text = _CALLED.get(kind, kind.replace("_", " "))
        if kind == ATTEMPT:
            attempt += 1
            text = f"attempt {attempt} begins"
        elif kind == "suspension" and each.get("is_over"):
            text = "resumed"
        elif kind == "restart" and each.get("task"):
            text = f"{each['task']}: {text}"
        step = number(each.get("global_step"))
        if step is None:
            step = _estimate_step(number(each.get("time")), known)
        if step is not None:
            found.append((step, text))
    return found


def _estimate_step(time: float | None, known: Sequence[tuple[float, float]]) -> float | None:
    at = 0 if time is None else bisect_right(known, (time, math.inf))
    if time is None or not at:
        return None
    begun, low = known[at - 1]
    # Do not interpolate if the run resumed at a lower global step.
    if at == len(known) or known[at][1] < low:
        return low
    ended, high = known[at]
    return low + (high - low) * (time - begun) / (ended - begun)


def count_texts(texts: Iterable[str]) -> str:
    """List the distinct texts, with the number of times that each occurs."""
    counts = Counter(texts)
    first = [f"{text} ({n})" if n > 1 else text for text, n in counts.items()][:_MOST_PARTS]
    return ", ".join([*first, "others"] if len(counts) > len(first) else first)


def is_wrong(row: Facts) -> bool | None:
    """Return whether the prediction was wrong, or None for a numeric prediction."""
    label, predicted = row.get("label"), row.get("predicted")
    if None in (label, predicted) or "error" in row or isinstance(predicted, float):
        return None
    return bool(label != predicted or (number(row.get("accuracy")) or 1.0) < 1.0)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of the table of worst examples."""

    title: str
    is_number: bool


def worst_table(
    rows: Sequence[Facts], placed: Sequence[str]
) -> tuple[list[Column], list[list[object]]]:
    """Return the table of worst examples: labels and outputs, then inputs.

    `placed` are keys that the table leaves out.
    """
    reported = ["label", "predicted"]
    reported += [name for row in rows for name in row if name not in (*placed, *reported)]
    names = [(name, False) for name in dict.fromkeys(reported) if any(name in row for row in rows)]
    inputs = dict.fromkeys(
        name for row in rows if isinstance(row.get("columns"), Mapping) for name in row["columns"]
    )
    names += [(name, True) for name in inputs][:_MOST_COLUMNS]
    if not inputs and any(row.get("inputs") for row in rows):
        names.append(("inputs", False))
    table = [
        [(row.get("columns") or {}).get(name) if is_input else row.get(name)
         for name, is_input in names]
        for row in rows
    ]  # fmt: skip
    columns = [
        Column(
            title=name if is_input else title_metric(name),
            is_number=all(number(cells[at]) is not None for cells in table),
        )
        for at, (name, is_input) in enumerate(names)
    ]
    return columns, table
