"""Renders `report.html`, a page that needs no other files, and loads templates of all pages.

The facts of a run are plain data. Any of them may be missing, for example if the run failed early:

    run_id      text
    verdict     "blessed", "refused", "unchanged", "trained", "done", "failed", "interrupted" or
                "running"
    config      the configuration, nested
    steps       [{"step", "status", "seconds", "metrics": {name: value}, "uri", "error",
                "output": the kind of directory at `uri`}]; a step that was tried more than once
                also has "tries" and "earlier_seconds", and a step that failed in the user's code
                also has "traceback"
    tries       [{"step", "status", "began": Unix timestamp, "seconds"}], every try of each step
    metrics     {name: value} of the test split
    rules       [{"metric", "key", "bound", "threshold", "value", "passed", "note"}] of the gate
    reasons     [text] of the gate's decision
    notes       [text] of the gate, which do not depend on its decision
    history     [{"global_step", "loss", "validation_loss", "validation_<metric>", ...}]
    incidents   [{"event", "time": Unix timestamp, ...}]
    checkpoints [{"event", "time", ...}]
    evaluation  `metrics.json` of the evaluation
    curves      `curves.json` of the evaluation
    pictures    {path of a worst example: base64-encoded PNG}
    validation  `validation.json`
    registered  `registration.json`
    model       the manifest of the model
    lineage     {name: value}
    artifacts   {name: URI} of everything that was published
    workdir     the working directory of a run on one machine
    cost        {name: value}
    error       the cause of a failure that no step reports
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.config.program import hide_environment
from flotilla.trainer.events.progress import duration
from flotilla.trainer.report import heading, headline, views
from flotilla.trainer.report.charts import is_constant, line_chart
from flotilla.trainer.report.headline import sentence
from flotilla.trainer.report.wording import (
    format_value,
    interval_text,
    key_metrics,
    like,
    round_value,
    spell_metric,
    title_metric,
)
from flotilla.trainer.runtime.masking import mask, one_line, printable

_OWN = Path(__file__).parent
_ACROSS, _NAMED = "global_step", "global steps"
_RATE = "Learning rate"
_CHARTS = {
    _RATE: {"learning_rate": "training"},
    "Global steps per second": {"steps_per_second": "training"},
    "Staleness in updates": {"staleness_mean": "mean", "staleness_p95": "95th percentile"},
}
# The page lists only the newest incidents. The event log has all of them.
_MOST_INCIDENTS = 200
# Keys to omit from the details of an incident.
_APART = ("event", "time", "last_lines")
# Keys to omit from the details of a worst example.
_PLACED = ("index", "label", "predicted", "inputs", "columns", "picture", "data")

# The characters to escape, the maximum length of a list, and the lineage, in the summary.
_MARKS = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")
_MOST = 12
_LINEAGE = ("image", "commit", "code", "dataset", "checkpoint")

Facts = Mapping[str, Any]


def write(facts: Facts, path: Path) -> None:
    """Write the report of a run to `path`, atomically. Raises `UserError`."""
    page = mask(render(facts))
    storage.write_bytes(storage.uri_of(path), page.encode(errors="backslashreplace"))


def _make_yaml(config: object) -> str:
    plain = json.loads(json.dumps(config, default=str))
    found: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None)
    return found if config else ""


def render(facts: Facts) -> str:
    """Return the report of a run as HTML. All text in `facts` is escaped."""
    verdict = str(facts.get("verdict") or "unknown")
    steps = _rows(facts, "steps")
    incidents = _rows(facts, "incidents")
    bars, idle = views.time_line(_rows(facts, "tries"), [*_rows(facts, "checkpoints"), *incidents])
    evaluation, artifacts = facts.get("evaluation") or {}, facts.get("artifacts") or {}
    metrics = views.metric_rows(evaluation, facts.get("metrics") or {})
    broken = [each for each in list_rules(facts) if not each.get("passed")]
    return _template().render(
        run_id=str(facts.get("run_id") or "run"),
        verdict=verdict,
        title=headline.title(_outcome(facts)),
        headline=make_headline(facts),
        notes=facts.get("notes") or (),
        reasons=list_reasons(facts),
        cause=heading.cause(steps) if verdict == "failed" else {},
        commands=heading.commands(facts, broken),
        particulars=heading.particulars(facts),
        use=heading.use(facts),
        data_page=artifacts.get("data page"),
        warnings=list_warnings(facts),
        metrics=metrics,
        tiles=views.tiles(evaluation, metrics),
        rules=list_rules(facts),
        intervals=evaluation.get("intervals") or {},
        **_describe_training(facts, incidents),
        steps=steps,
        sources=list_sources(facts),
        bars=bars,
        idle=idle,
        marks=[mark for bar in bars for mark in bar.marks],
        incidents=_number_incidents(incidents),
        passed_over=len(incidents[:-_MOST_INCIDENTS]),
        config=_make_yaml(hide_environment(facts.get("config") or {})),
        registered=facts.get("registered") or {},
        **_describe_metrics(evaluation, facts),
    )


def make_headline(facts: Facts) -> str:
    """Return the result of a run in one sentence."""
    return headline.headline(_outcome(facts))


def _outcome(facts: Facts) -> dict[str, Any]:
    verdict, registered = facts.get("verdict"), facts.get("registered") or {}
    ill = [each.get("step") for each in _rows(facts, "steps") if _is_decisive(each, verdict)]
    if verdict == "blessed" and registered.get("decision") == "promoted":
        verdict = "promoted"
    return {
        "name": (facts.get("config") or {}).get("name") or facts.get("run_id"),
        "version": registered.get("version"),
        "verdict": verdict,
        "measured": headline.describe_metric(facts.get("evaluation") or {}),
        # None means an unreadable decision. An empty list means a decision without rules.
        "rules": None if facts.get("rules") is None else list_rules(facts),
        "step": ill[0] if ill else "",
    }


def _is_decisive(step: Facts, verdict: object) -> bool:
    if verdict != "refused":
        return bool(step.get("status") == verdict != "done")
    metrics = step.get("metrics")
    return isinstance(metrics, Mapping) and metrics.get("decision") == verdict


def _describe_training(facts: Facts, incidents: Sequence[Facts]) -> dict[str, Any]:
    history = _rows(facts, "history")
    flags = views.flags(incidents, _rows(facts, "checkpoints"))
    evaluation, steps = facts.get("evaluation") or {}, _rows(facts, "steps")
    # If nothing was evaluated, use the main metric that the training step recorded.
    said = next((e for e in (evaluation, *steps) if e.get("main_metric")), {})
    metrics = views.training(history, MainMetric.of(said or evaluation).name)
    drawn = {title_metric(name): series for name, series in metrics.items()}
    constant, rate = _describe_selection(steps), is_constant(history, _ACROSS, "learning_rate")
    drawn |= _CHARTS
    if rate is not None:
        constant.append(f"{_RATE}: {round_value(rate)} throughout.")
        del drawn[_RATE]
    charts = [
        line_chart(
            title,
            history,
            _ACROSS,
            series,
            flags=flags,
            logarithmic="loss" in title.lower(),
            named=_NAMED,
        )
        for title, series in drawn.items()
    ]
    return {
        "charts": [chart for chart in charts if chart],
        "constant": constant,
        "flagged": views.count_texts(text for _, text in flags),
        "last": (last := history[-1] if history else {}),
        "epoch": heading.steps_of_epoch(last),
    }


def _describe_selection(steps: Sequence[Facts]) -> list[str]:
    said = (e["metrics"] for e in steps if isinstance(e.get("metrics"), Mapping))
    metrics: Facts = next((each for each in said if each.get("handed_on_as")), {})
    step, of = metrics.get("handed_on_step"), metrics.get("global_step")
    # A user's training program may not report its steps. In this case, omit them.
    which = f"global step {step} of {of}" if of else "the checkpoint"
    return [f"Evaluated: {which}, {metrics['handed_on_as']}."] if metrics else []


def list_sources(facts: Facts) -> dict[str, Any]:
    """Return the origin and cost of a run, without facts that the page shows elsewhere."""
    lineage = facts.get("lineage") or {}
    named = {**(facts.get("artifacts") or {}), **lineage, **(facts.get("cost") or {})}
    said = [facts.get("run_id"), *(step.get("uri") for step in _rows(facts, "steps"))]
    return {
        name: round_value(value) if isinstance(value, float) else value
        for name, value in named.items()
        if name != "data page" and value not in ("", None) and value not in said
    }


def list_reasons(facts: Facts) -> list[str]:
    """Return the reasons for the result of a run: from the data, the gate and failed steps."""
    error = [str(facts["error"])] if facts.get("error") else []
    return [*_data_lines(facts, "reasons"), *_reasons(facts), *error]


def list_warnings(facts: Facts) -> list[str]:
    """Return the warnings of data validation and the notes of the other steps."""
    said = [step.get("metrics") for step in _rows(facts, "steps")]
    # Leave out the notes of the gate, which the heading of the page already shows.
    notes = [
        each.get("notes") for each in said if isinstance(each, dict) and "decision" not in each
    ]
    noted = [f"the data: {line}" for each in notes if isinstance(each, list) for line in each]
    return [*_data_lines(facts, "warnings"), *noted]


def _data_lines(facts: Facts, name: str) -> list[str]:
    return [f"the data: {line}" for line in (facts.get("validation") or {}).get(name) or ()]


def _describe_metrics(evaluation: Facts, facts: Facts) -> dict[str, Any]:
    pictures = facts.get("pictures") or {}
    outputs = evaluation.get("outputs") or {}
    return {
        "champion": evaluation.get("champion") or {},
        "opponents": headline.opponents(evaluation),
        "remarks": views.remarks(evaluation),
        "placed": _PLACED,
        "examples": evaluation.get("examples"),
        "classified": [
            _class_plots("", evaluation, facts.get("curves") or ()),
            *(_class_plots(name, each, each.get("curves") or ()) for name, each in outputs.items()),
        ],
        "parts": views.weak_parts(evaluation),
        "main_metric": MainMetric.of(evaluation).name,
        "tables": evaluation.get("tables") or [],
        "own_charts": views.charts(evaluation),
        **_worst(_rows(evaluation, "worst"), pictures),
    }


def _worst(rows: Sequence[Facts], pictures: Facts) -> dict[str, Any]:
    wrong = [row for row in rows if views.is_wrong(row)]
    right = [row for row in rows if views.is_wrong(row) is False]
    groups = {"wrong": wrong, "right": right} if wrong or right else {"": list(rows)}
    columns, table = views.worst_table([*wrong, *right] or rows, _PLACED)
    named = [
        (name, [{**row, "data": pictures.get(str(row.get("picture")), "")} for row in group])
        for name, group in groups.items()
        if group
    ]
    cells = iter(table)
    return {
        "worst": [(name, group, [next(cells) for _ in group]) for name, group in named],
        "pictured": any(row.get("picture") for row in rows),
        "worst_columns": columns,
    }


def _class_plots(output: str, evaluation: Facts, curves: Sequence[Facts]) -> dict[str, Any]:
    calibration = views.calibration(evaluation)
    return {
        "of": f" of {output}" if output else "",
        "labels": evaluation.get("labels") or [],
        "matrix": views.matrix(evaluation),
        "classes": views.weak_classes(evaluation),
        "confusions": views.confusions(evaluation),
        "curves": [*views.curves(evaluation, curves), *([calibration] if calibration else [])],
    }


def earlier(step: Facts) -> str:
    """Return ` + TIME in N earlier tries`, to be appended to the duration of the last try."""
    tries = step.get("tries")
    if not isinstance(tries, int) or tries <= 1:
        return ""
    word = "try" if tries - 1 == 1 else "tries"
    return f" + {duration(step.get('earlier_seconds'))} in {tries - 1} earlier {word}"


def environment(folder: Path = _OWN) -> jinja2.Environment:
    """Return an environment for HTML templates in `folder`, which may include this package's."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _OWN]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["share"] = like(0.5)
    made.filters.update(
        duration=duration,
        formatted=format_value,
        interval=interval_text,
        rounded=round_value,
        sentence=sentence,
        spoken=spell_metric,
        titled=title_metric,
        words=lambda name: str(name).replace("_", " "),
    )
    return made


@cache
def _template() -> jinja2.Template:
    made = environment()
    made.filters.update(
        earlier=earlier,
        href=heading.href,
        key_metrics=lambda found: key_metrics(found) if isinstance(found, Mapping) else found,
    )
    return made.get_template("report.html.j2")


def _rows(facts: Facts, name: str) -> list[dict[str, Any]]:
    return [dict(row) for row in facts.get(name) or ()]


def _reasons(facts: Facts) -> list[str]:
    steps, registered = _rows(facts, "steps"), facts.get("registered") or {}
    if facts.get("verdict") == "refused":
        intervals = (facts.get("evaluation") or {}).get("intervals") or {}
        broken = [sentence(each, intervals) for each in list_rules(facts) if not each.get("passed")]
        # A model that lost a promotion race breaks no rule, so list the recorded reasons.
        return broken or [
            str(each) for of in (facts, registered) for each in of.get("reasons") or ()
        ]
    if facts.get("verdict") in ("unchanged", "trained"):
        return [
            str(each) for step in steps for each in (step.get("metrics") or {}).get("reasons", ())
        ]
    failed = [step for step in steps if step.get("status", "done") not in ("done", "skipped")]
    return [
        f"{format_value(step.get('step'))}: {format_value(step.get('error'))}" for step in failed
    ]


def list_rules(facts: Facts) -> list[dict[str, Any]]:
    """Return the rules of the gate, followed by the rules of the registry."""
    registered = facts.get("registered") or {}
    return [*_rows(facts, "rules"), *_rows(registered, "rules")]


def _number_incidents(events: Sequence[Facts]) -> list[dict[str, str]]:
    attempts, found = 1, []
    for event in events:
        name = format_value(event.get("event"))
        if name == views.ATTEMPT:
            attempts += 1
            name = f"attempt {attempts} begins"
        lines = event.get("last_lines")
        found.append({
            "time": heading.clock(event.get("time")),
            "event": name,
            "what": format_value({k: v for k, v in event.items() if k not in _APART}),
            "lines": "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else "",
        })  # fmt: skip
    return found[-_MOST_INCIDENTS:]


def to_markdown(facts: Facts, report: str) -> bytes:
    """Return the summary of a run as Markdown.

    All text is escaped. `report` is the URI of the full report, or empty.
    """
    verdict = str(facts.get("verdict") or "unknown")
    cost, notes = facts.get("cost") or {}, facts.get("notes") or ()
    evaluation = facts.get("evaluation") or {}
    intervals = evaluation.get("intervals") or {}
    opponents = map(plain, headline.opponents(evaluation))
    rows = views.metric_rows(evaluation, facts.get("metrics") or {})
    rules = [
        (sentence(each, intervals), "passed" if each.get("passed") else "failed")
        for each in list_rules(facts)
    ]
    steps = [
        (
            each.get("step", ""),
            each.get("status", ""),
            f"{duration(each.get('seconds'))}{earlier(each)}",
        )
        for each in facts.get("steps") or ()
    ]
    lineage = facts.get("lineage") or {}
    blocks = [
        [f"# {plain(facts.get('run_id') or 'run')}: {plain(verdict)}"],
        [f"**{plain(make_headline(facts))}**"],
        [f"- {plain(each)}" for each in list_reasons(facts)[:_MOST]],
        [f"- ⚠ {plain(each)}" for each in [*notes, *list_warnings(facts)][:_MOST]],
        table(
            ("metric", "model", *opponents),
            [
                (title_metric(each["name"]), *(text for text, _ in each["cells"]))
                for each in rows[:_MOST]
            ],
        ),
        table(("rule", ""), rules[:_MOST]),
        table(("step", "ended", "duration"), steps),
        table(("cost", ""), [(name.replace("_", " "), value) for name, value in cost.items()]),
        table(("from", "what"), [(n, lineage[n]) for n in _LINEAGE if lineage.get(n)]),
        [f"Full report: {code(report)}"] if report else [],
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return text.encode(errors="backslashreplace")


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table, or an empty list without rows."""
    if not rows:
        return []
    texts = ([plain(v if isinstance(v, str) else format_value(v)) for v in row] for row in rows)
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *texts)]


def plain(text: object) -> str:
    """Escape text for Markdown and put it on one line."""
    return _MARKS.sub(r"\\\1", " ".join(one_line(str(text)).split()))


def code(text: str) -> str:
    """Format text as inline code in Markdown."""
    return f"`{' '.join(one_line(text).split()).replace('`', '')}`"
