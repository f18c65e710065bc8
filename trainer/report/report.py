"""`report.html`: one run on one page without external files.

The facts of a run are plain data; every part may be missing, as it is when a run failed early:

    run_id      text
    verdict     "blessed", "refused", "unchanged", "done", "failed", "interrupted" or
                "running"
    config      the configuration, nested
    steps       [{"step", "status", "seconds", "metrics": {name: value}, "uri", "error"}], of one
                that was tried again also "tries" and "earlier_seconds", of one that failed in the
                user's code also "traceback"
    tries       [{"step", "status", "began": seconds since 1970, "seconds"}], every try of a step
    metrics     {name: value} of the test split
    rules       [{"metric", "key", "bound", "threshold", "value", "passed", "note"}] of the gate
    history     [{"global_step", "loss", "validation_loss", "validation_<metric>", ...}]
    incidents   [{"event", "time": seconds since 1970, ...}]
    checkpoints [{"event", "time", ...}]
    evaluation  `metrics.json` of the evaluation
    curves      its `curves.json`
    pictures    {path of a worst example: PNG in base64}
    validation  `validation.json`
    registered  `registration.json`
    lineage     {name: value}
    cost        {name: value}
    error       what is known of a failure that no step reports
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from trainer import storage
from trainer.masking import masked
from trainer.report import views
from trainer.report.views import HEIGHT, LEFT, RIGHT, WIDTH, line_chart

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_CHARTS = (
    ("Learning rate", {"learning_rate": "training"}),
    ("Global steps a second", {"steps_per_second": "training"}),
    ("Staleness in updates", {"staleness_mean": "mean", "staleness_p95": "95th percentile"}),
)
HEADLINES = {
    "blessed": "The model keeps to every rule.",
    "refused": "It was refused; the champion stays as it was.",
    "unchanged": "There is nothing new; an earlier run has done the same.",
    "done": "Every step of the run is done.",
    "failed": "The run failed.",
    "running": "The run is tried again after its end; this page was written while it was going on.",
    "interrupted": "The run was interrupted; what was published before is kept.",
}
_SIZE = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT}
NOTHING = "-"
# Of a worst example, what is not one of the lines below it.
_PLACED = ("index", "label", "predicted", "inputs", "picture", "data")

Facts = Mapping[str, Any]


def write(facts: Facts, path: Path) -> None:
    """Write the page of a run to `path`; a reader sees the old page or the new.

    Raises:
        UserError: the file cannot be written.
    """
    page = masked(render(facts))
    storage.write_bytes(storage.uri_of(path), page.encode(errors="backslashreplace"))


def render(facts: Facts) -> str:
    """Return the page of a run as HTML; all that `facts` say is escaped."""
    verdict = str(facts.get("verdict") or "unknown")
    steps, rules, history = (_rows(facts, name) for name in ("steps", "rules", "history"))
    incidents = _rows(facts, "incidents")
    bars = views.time_line(_rows(facts, "tries"), [*_rows(facts, "checkpoints"), *incidents])
    error = [str(facts["error"])] if facts.get("error") else []
    registered = facts.get("registered") or {}
    evaluation, validation = facts.get("evaluation") or {}, facts.get("validation") or {}
    measured = {_titled(name): series for name, series in views.training(history).items()}
    drawn = {**measured, **dict(_CHARTS)}
    charts = (line_chart(title, history, "global_step", each) for title, each in drawn.items())
    metrics = views.metric_rows(evaluation, facts.get("metrics") or {})
    rules += [dict(rule) for rule in registered.get("rules") or ()]
    return _template().render(
        run_id=str(facts.get("run_id") or "run"),
        verdict=verdict,
        headline=HEADLINES.get(verdict, "How the run ended is not known."),
        reasons=[
            *_of_data(validation, "reasons"),
            *_reasons(verdict, steps, rules, registered),
            *error,
        ],
        warnings=_of_data(validation, "warnings"),
        metrics=metrics,
        tiles=views.tiles(evaluation, metrics),
        rules=rules,
        size=_SIZE,
        charts=[chart for chart in charts if chart],
        last=history[-1] if history else {},
        steps=steps,
        bars=bars,
        marks=[mark for bar in bars for mark in bar.marks],
        incidents=[_incident(each) for each in incidents],
        config=_yaml(facts.get("config") or {}),
        lineage=facts.get("lineage") or {},
        cost=facts.get("cost") or {},
        registered=registered,
        **_measured(evaluation, facts),
    )


def _of_data(validation: Facts, name: str) -> list[str]:
    return [f"the data: {line}" for line in validation.get(name) or ()]


def _measured(evaluation: Facts, facts: Facts) -> dict[str, Any]:
    pictures = facts.get("pictures") or {}
    outputs = evaluation.get("outputs") or {}
    return {
        "champion": evaluation.get("champion") or {},
        "placed": _PLACED,
        "examples": evaluation.get("examples"),
        "classified": [
            _classified("", evaluation, facts.get("curves") or ()),
            *(_classified(name, each, each.get("curves") or ()) for name, each in outputs.items()),
        ],
        "parts": views.weak_parts(evaluation),
        "main_metric": views.main_metric(evaluation),
        "tables": evaluation.get("tables") or [],
        "own_charts": views.charts(evaluation),
        "worst": [
            {**row, "data": pictures.get(row.get("picture"), "")}
            for row in _rows(evaluation, "worst")
        ],
    }


def _classified(output: str, evaluation: Facts, curves: Sequence[Facts]) -> dict[str, Any]:
    """Return what is shown of the classes of a model, or of one of its outputs."""
    calibration = views.calibration(evaluation)
    return {
        "of": f" of {output}" if output else "",
        "labels": evaluation.get("labels") or [],
        "matrix": views.matrix(evaluation),
        "classes": views.weak_classes(evaluation),
        "confusions": views.confusions(evaluation),
        "curves": views.curves(evaluation, curves),
        "calibration": [calibration] if calibration else [],
    }


def _titled(name: str) -> str:
    return name.replace("_", " ").capitalize()


def formatted(value: object) -> str:
    """Return a value as a person reads it."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {formatted(each)}" for name, each in value.items()) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(formatted(each) for each in value) or NOTHING
    return str(value)


def earlier(step: Facts) -> str:
    """Return what the earlier tries of a step have taken, to be read after its own seconds."""
    tries = step.get("tries")
    if not isinstance(tries, int) or tries <= 1:
        return ""
    word = "try" if tries - 1 == 1 else "tries"
    return f" + {formatted(step.get('earlier_seconds'))} s in {tries - 1} earlier {word}"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["formatted"] = formatted
    environment.filters["earlier"] = earlier
    environment.filters["short"] = lambda value: NOTHING if value is None else f"{value:.4g}"
    environment.filters["interval"] = lambda pair: " to ".join(f"{end:.4g}" for end in pair)
    environment.filters["words"] = lambda name: str(name).replace("_", " ")
    return environment.get_template(_TEMPLATE.name)


def _rows(facts: Facts, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in facts.get(name) or ()]


def _reasons(
    verdict: str, steps: Sequence[Facts], rules: Sequence[Facts], registered: Facts
) -> list[str]:
    if verdict == "refused":
        stand = [_stand(rule) for rule in rules if not rule.get("passed")]
        # A race that was lost broke no rule.
        return stand or [str(reason) for reason in registered.get("reasons") or ()]
    if verdict == "unchanged":
        return [str(each) for step in steps for each in step["metrics"].get("reasons", ())]
    failed = [step for step in steps if step.get("status", "done") not in ("done", "skipped")]
    return [f"{formatted(step.get('step'))}: {formatted(step.get('error'))}" for step in failed]


def _stand(rule: Facts) -> str:
    key = rule.get("key") or f"gate.{rule.get('bound')}"
    bound = f"{key} {formatted(rule.get('threshold'))}"
    value = rule.get("value")
    if value is None:
        return f"{rule.get('metric')} is not a finite number, and {bound} asks for one."
    # The gate compares exact values; numbers rounded for reading could look equal.
    note = f" ({rule['note']})" if rule.get("note") else ""
    return f"{rule.get('metric')} is {value!r}, and {bound} does not allow that{note}."


def _incident(event: Facts) -> dict[str, str]:
    apart = ("event", "time", "last_lines")
    lines = event.get("last_lines")
    rest = {name: value for name, value in event.items() if name not in apart}
    return {
        "time": _clock(event.get("time")),
        "event": formatted(event.get("event")),
        "what": formatted(rest),
        "lines": "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else "",
    }


def _clock(seconds: object) -> str:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return formatted(seconds)
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return formatted(seconds)


def _yaml(config: object) -> str:
    if not config:
        return ""
    plain = json.loads(json.dumps(config, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None)
