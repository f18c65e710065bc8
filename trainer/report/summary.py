"""`summary.md`: a run at a glance, for the KFP UI, from the facts of `trainer.report.report`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.masking import one_line
from trainer.report.report import HEADLINES, earlier, reasons_of, rules_of, warnings_of
from trainer.report.wording import formatted

Facts = Mapping[str, Any]

_MARKS = re.compile(r"([\\`*_{}\[\]<>()#+!|~$&])")
_MOST = 12
_LINEAGE = ("image", "commit", "code", "dataset", "checkpoint")


def as_markdown(facts: Facts, report: str) -> bytes:
    """Return the summary of a run, escaped; `report` is the URI of the whole report, or empty."""
    verdict = str(facts.get("verdict") or "unknown")
    cost = facts.get("cost") or {}
    blocks = [
        [f"# {plain(facts.get('run_id') or 'run')}: {plain(verdict)}"],
        [HEADLINES.get(verdict, "How the run ended is not known.")],
        [f"- {plain(each)}" for each in [*reasons_of(facts), *warnings_of(facts)][:_MOST]],
        table(("metric", "value"), list((facts.get("metrics") or {}).items())[:_MOST]),
        table(("rule", "asked", "found", ""), [_rule(each) for each in rules_of(facts)[:_MOST]]),
        table(("step", "ended", "seconds"), [_step(each) for each in facts.get("steps") or ()]),
        table(("cost", ""), [(name.replace("_", " "), value) for name, value in cost.items()]),
        table(("from", "what"), _lineage(facts)),
        [f"The whole report: {code(report)}"] if report else [],
    ]
    text = "\n\n".join("\n".join(block) for block in blocks if block) + "\n"
    return text.encode(errors="backslashreplace")


def _rule(rule: Facts) -> tuple[object, ...]:
    sign = {"min": "at least", "max": "at most"}.get(str(rule.get("bound")), "")
    asked = f"{sign} {formatted(rule.get('threshold'))}".strip()
    return (
        rule.get("metric", ""), asked, rule.get("value"), "kept" if rule.get("passed") else "broken"
    )  # fmt: skip


def _step(step: Facts) -> tuple[object, ...]:
    seconds = f"{formatted(step.get('seconds'))}{earlier(step)}"
    return (step.get("step", ""), step.get("status", ""), seconds)


def _lineage(facts: Facts) -> list[tuple[str, object]]:
    lineage = facts.get("lineage") or {}
    return [(name, lineage[name]) for name in _LINEAGE if lineage.get(name)]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table of plain texts and values; none where there is no row."""
    if not rows:
        return []
    texts = ([plain(v if isinstance(v, str) else formatted(v)) for v in row] for row in rows)
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *texts)]


def plain(text: object) -> str:
    """Return a text that Markdown shows as it is, on one line."""
    return _MARKS.sub(r"\\\1", " ".join(one_line(str(text)).split()))


def code(text: str) -> str:
    """Return a text that Markdown shows as code, on one line."""
    return f"`{' '.join(one_line(text).split()).replace('`', '')}`"
