"""`report.html`: one run on one page that needs nothing beside itself.

The facts of a run are plain data; every part may be missing, as it is when a run failed early:

    run_id      text
    verdict     "blessed", "refused", "done", "failed" or "interrupted"
    config      the configuration, nested
    steps       [{"step", "status", "seconds", "figures": {name: value}, "uri", "error"}]
    metrics     {name: value} of the test split
    rules       [{"metric", "bound", "threshold", "value", "passed"}] of the gate
    history     [{"global_step", "loss", "validation_loss", "validation_accuracy", ...}]
    incidents   [{"event", "time": seconds since 1970, ...}]
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
from trainer.charts import HEIGHT, LEFT, RIGHT, WIDTH, Chart, line_chart

_TEMPLATE = Path(__file__).with_name("report.html.j2")
_CHARTS = (
    ("Loss", {"loss": "training", "validation_loss": "validation"}),
    ("Accuracy", {"validation_accuracy": "validation"}),
    ("Global steps a second", {"steps_per_second": "training"}),
)
_HEADLINES = {
    "blessed": "The model keeps to every rule of the gate.",
    "refused": "The gate refused the model; nothing was exported.",
    "done": "Every step of the run is done.",
    "failed": "The run failed.",
    "interrupted": "The run was interrupted; what was published before is kept.",
}
_SIZE = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT}
NOTHING = "-"

Facts = Mapping[str, Any]


def write(facts: Facts, path: Path) -> None:
    """Write the page of a run to `path`; a reader sees the old page or the new.

    Raises:
        UserError: the file cannot be written.
    """
    storage.write_bytes(storage.uri_of(path), render(facts).encode(errors="backslashreplace"))


def render(facts: Facts) -> str:
    """Return the page of a run as HTML; all that `facts` say is escaped."""
    verdict = str(facts.get("verdict") or "unknown")
    steps, rules, history = (_rows(facts, name) for name in ("steps", "rules", "history"))
    return _template().render(
        run_id=str(facts.get("run_id") or "run"),
        verdict=verdict,
        headline=_HEADLINES.get(verdict, "How the run ended is not known."),
        reasons=_reasons(verdict, steps, rules),
        metrics=facts.get("metrics") or {},
        rules=rules,
        size=_SIZE,
        charts=_charts(history),
        last=history[-1] if history else {},
        steps=steps,
        incidents=[_incident(each) for each in _rows(facts, "incidents")],
        config=_yaml(facts.get("config") or {}),
    )


def figure(value: object) -> str:
    """Return a value as a person reads it."""
    if value is None or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {figure(each)}" for name, each in value.items()) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(figure(each) for each in value) or NOTHING
    return str(value)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = figure
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))


def _rows(facts: Facts, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in facts.get(name) or ()]


def _reasons(verdict: str, steps: Sequence[Facts], rules: Sequence[Facts]) -> list[str]:
    if verdict == "refused":
        return [_stand(rule) for rule in rules if not rule.get("passed")]
    failed = [step for step in steps if step.get("status", "done") != "done"]
    return [f"{figure(step.get('step'))}: {figure(step.get('error'))}" for step in failed]


def _stand(rule: Facts) -> str:
    bound = f"gate.{rule.get('bound')} {figure(rule.get('threshold'))}"
    value = rule.get("value")
    if value is None:
        return f"{rule.get('metric')} is not a finite number, and {bound} asks for one."
    # The gate compares exact values; figures rounded for reading could look equal.
    return f"{rule.get('metric')} is {value!r}, and {bound} does not allow that."


def _charts(history: Sequence[Facts]) -> list[Chart]:
    drawn = (line_chart(title, history, "global_step", series) for title, series in _CHARTS)
    return [chart for chart in drawn if chart]


def _incident(event: Facts) -> dict[str, str]:
    rest = {name: value for name, value in event.items() if name not in ("event", "time")}
    return {
        "time": _clock(event.get("time")),
        "event": figure(event.get("event")),
        "what": figure(rest),
    }


def _clock(seconds: object) -> str:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return figure(seconds)
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return figure(seconds)


def _yaml(config: object) -> str:
    if not config:
        return ""
    plain = json.loads(json.dumps(config, default=str))
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None)
