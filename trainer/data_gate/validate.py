"""Checks a dataset against the rules, and publishes the findings.

A validation is a published directory:

    validation.json   {"decision": "accepted" | "refused", "reasons": [lines of findings that
                       refuse], "warnings": [lines of others], "findings": [{"rule", "feature",
                       "split", "value", "limit", "champion", "says", "action"}], "dataset": URI,
                       "champion": {"version", "dataset", "note"}, "examples": {split: number}}
    page.html         the report, with the distribution of each feature
    schema.yaml       a schema that the dataset satisfies, inferred from its statistics
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from flotilla.trainer import storage
from flotilla.trainer.config.data import OFF, REFUSE, WARN, DataGateConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data_gate import (
    drift,
    expected,
    labels,
    leaks,
    values,
)
from flotilla.trainer.data_gate.findings import Finding, Question, Rule, percent, some
from flotilla.trainer.data_gate.profile import DatasetProfile, FeatureProfile, make_profile
from flotilla.trainer.features.statistics.statistics import CLASS, TEXT
from flotilla.trainer.promotion import registry
from flotilla.trainer.report.charts import fit_axis
from flotilla.trainer.report.report import environment
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.masking import mask

KIND = "validation"
ACCEPTED, REFUSED = "accepted", "refused"
FILE, PAGE = "validation.json", "page.html"
_MOST_LINES = 5
_RULES: tuple[Rule, ...] = (
    values.schema,
    values.features,
    values.sizes,
    values.missing,
    values.constant,
    labels.classes,
    labels.shares,
    leaks.leakage,
    leaks.duplicates,
    labels.association,
    leaks.label_leakage,
    values.unit,
    values.find_out_of_range,
    values.new_values,
    drift.compare_features,
    drift.compare_together,
    drift.compare_splits,
)


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """The champion's dataset. If there is none, `note` gives the reason."""

    version: int = 0
    uri: str = ""
    note: str = ""
    profile: DatasetProfile | None = None


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The contents of a validation's files: `validation.json`, the HTML page and `schema.yaml`."""

    facts: Mapping[str, Any]
    page: bytes
    schema: str

    @property
    def decision(self) -> str:
        """Either "accepted" or "refused"."""
        return str(self.facts["decision"])

    @property
    def digest(self) -> str:
        """The facts as a canonical string. Equal validations have equal strings."""
        return json.dumps(self.facts, sort_keys=True)


def opponent(root: str, name: str) -> Opponent:
    """Return the dataset of a model's champion, if it still exists."""
    number = registry.champion_number(root, name)
    if not number:
        return Opponent(note=f"{name} has no champion yet")
    try:
        champion = registry.read_promoted(root, name, number)
        uri = str(champion.manifest.fields.get("lineage", {}).get("dataset", ""))
        if not uri:
            return Opponent(version=number, note=f"version {number} does not record its dataset")
        return Opponent(version=number, uri=uri, profile=make_profile(uri))
    except storage.Unavailable:
        raise
    except UserError as error:
        return Opponent(version=number, note=f"version {number} cannot be read: {error}")


def check(config: Config, dataset: str, champion: Opponent) -> Validation:
    """Check the dataset at a URI against the rules.

    Raises:
        UserError: the dataset or the schema file cannot be read.
    """
    schema = expected.read(config.data.schema_file)
    found = make_profile(dataset)
    rules = config.data.gate
    question = Question(
        dataset=found, champion=champion.profile, limits=rules, gate=config.gate, schema=schema,
        splits=config.data.splits,
    )  # fmt: skip
    facts = _facts(find_all(question), rules, found, champion)
    html = render_page(facts, found, champion.profile)
    return Validation(facts=facts, page=html, schema=expected.infer_schema(found))


def publish(validation: Validation, uri: str) -> None:
    """Publish a validation at a URI. Publishing it again is a no-op."""
    with tempfile.TemporaryDirectory(prefix="validation-") as folder:
        text = json.dumps(validation.facts, indent=2, ensure_ascii=False, allow_nan=False)
        Path(folder, FILE).write_text(text + "\n", encoding="utf-8")
        Path(folder, PAGE).write_bytes(validation.page)
        Path(folder, expected.FILE).write_text(validation.schema, encoding="utf-8")
        fields = {key: validation.facts[key] for key in ("decision", "dataset")}
        fields["champion"] = validation.facts["champion"]["dataset"]
        storage.publish(Path(folder), uri, kind=KIND, fields=fields)


def find_all(question: Question) -> list[Finding]:
    """Return the findings of all enabled rules."""
    found = (finding for rule in _RULES for finding in rule(question))
    return [each for each in found if question.limits.action(each.rule) != OFF]


def _lines(findings: Sequence[Finding], action: str) -> list[str]:
    """Return one line per finding. If a rule has many, the last line names the rest."""
    lines = []
    for rule in dict.fromkeys(each.rule for each in findings):
        found = [each for each in findings if each.rule == rule]
        many = len(found) > _MOST_LINES
        first_ones = found[: _MOST_LINES - 1] if many else found
        lines += [each.line(action) for each in first_ones]
        if many:
            rest = [each.feature or each.split for each in found[len(first_ones) :]]
            lines.append(f"{rule}: also {some(rest)}; {PAGE} lists all findings")
    return lines


def _facts(
    findings: Sequence[Finding], rules: DataGateConfig, dataset: DatasetProfile, champion: Opponent
) -> dict[str, Any]:
    lines = {
        action: _lines([each for each in findings if rules.action(each.rule) == action], action)
        for action in (REFUSE, WARN)
    }
    return {
        "decision": REFUSED if lines[REFUSE] else ACCEPTED,
        "reasons": lines[REFUSE],
        "warnings": lines[WARN],
        "findings": [each.to_json(rules.action(each.rule)) for each in findings],
        "dataset": dataset.uri,
        "champion": {
            "version": champion.version, "dataset": champion.uri, "note": champion.note,
        },
        "examples": {split: each.examples for split, each in dataset.splits.items()},
    }  # fmt: skip


_TEMPLATE = Path(__file__).with_name("page.html.j2")
# Maximum number of features on the page. Features with findings come first.
MOST_FEATURES = 60
_MOST_FINDINGS = 200
_BINS, _MOST_BARS, _LONGEST = 24, 12, 40
WIDTH, HEIGHT = 300, 90
# Minimum share of all other values together to get a bar. A smaller share is a rounding error.
_LEAST_REST = 1e-9
# Draw only values between these quantiles, because outliers would squeeze the rest into one bar.
_DRAWN = (0.005, 0.995)

# A bar: its name or position, and its size for the dataset and for the champion's dataset.
Bar = dict[str, Any]


def render_page(
    facts: Mapping[str, Any], dataset: DatasetProfile, champion: DatasetProfile | None
) -> bytes:
    """Return the report of a validation as HTML, with all data escaped."""
    known = champion.features("train") if champion else {}
    found = [each["feature"] for each in facts["findings"]]
    features = dataset.features("train")
    order = sorted(features, key=lambda name: name not in found)
    text = _template().render(
        tree=facts,
        notes=dataset.notes,
        findings=facts["findings"][:_MOST_FINDINGS],
        pictures=[
            _picture(name, features[name], known.get(name)) for name in order[:MOST_FEATURES]
        ],
        left_out=max(len(order) - MOST_FEATURES, 0),
        width=WIDTH,
        height=HEIGHT,
    )
    return mask(text).encode(errors="backslashreplace")


def _picture(name: str, new: FeatureProfile, old: FeatureProfile | None) -> dict[str, Any]:
    rows: list[tuple[str, object, object]]
    rows = [("missing", new.missing, old.missing if old else None)]
    if math.isfinite(new.mean):
        rows += [
            (word, _short(getattr(new, key)), _short(getattr(old, key)) if old else None)
            for word, key in (
                ("mean", "mean"), ("standard deviation", "std"),
                ("least", "least"), ("most", "most"),
            )
        ]  # fmt: skip
    rows.append(("values", new.distinct or None, (old.distinct or None) if old else None))
    is_named = new.kind in (TEXT, CLASS)
    drawn = {"values": _stack(new, old)} if is_named else _bin(new, old)
    return {"name": name, "facts": rows, "values": [], "bars": [], "ticks": (), **drawn}


def _short(value: float) -> str:
    return f"{value:.5g}"


def _stack(new: FeatureProfile, old: FeatureProfile | None) -> list[Bar]:
    """Return a bar for each of the most frequent values, and one for all others together."""
    names = sorted(new.counts, key=lambda value: -new.counts[value])[:_MOST_BARS]
    before = old.counts if old else {}
    whole, whole_before = max(new.present, 1), max(old.present, 1) if old else 1
    shares = [
        (name[:_LONGEST], new.counts[name] / whole, before.get(name, 0) / whole_before)
        for name in names
    ]
    rest = 1 - sum(share for _, share, _ in shares)
    if new.present and rest > _LEAST_REST:
        shares.append(("all others", rest, max(1 - sum(each for *_, each in shares), 0.0)))
    highest = max((max(each) for _, *each in shares), default=0.0) or 1.0
    return [
        {
            "name": name,
            "new": round(100 * now / highest, 1),
            "old": round(100 * then / highest, 1) if old else 0,
            "share": percent(now),
            "before": percent(then) if old else "",
        }
        for name, now, then in shares
    ]


def _bin(new: FeatureProfile, old: FeatureProfile | None) -> dict[str, Any]:
    both = [each.numbers for each in (new, old) if each and len(each.numbers)]
    if not len(new.numbers):
        return {}
    ends = [np.quantile(values, _DRAWN) for values in both]
    low, high = min(float(each[0]) for each in ends), max(float(each[1]) for each in ends)
    edges = np.linspace(low, high if high > low else low + 1, _BINS + 1)
    shares = [np.histogram(values, edges)[0] / len(values) for values in both]
    before = shares[1] if len(shares) > 1 else np.zeros(_BINS)
    highest = float(max(each.max() for each in shares)) or 1.0
    step = WIDTH / _BINS
    bars = [
        {
            "left": round(at * step, 1),
            "width": round(step * 0.9, 1),
            "new": round(HEIGHT * now / highest, 1),
            "old": round(HEIGHT * then / highest, 1),
            "label": f"{edges[at]:.4g} to {edges[at + 1]:.4g}: {percent(now)}"
            + (f", before {percent(then)}" if len(shares) > 1 else ""),
        }
        for at, (now, then) in enumerate(zip(shares[0], before, strict=True))
    ]
    found = fit_axis([float(edges[0]), float(edges[-1])], is_exact=True)
    return {"bars": bars, "ticks": found.ticks, "highest": percent(highest)}


@cache
def _template() -> jinja2.Template:
    return environment(_TEMPLATE.parent).get_template(_TEMPLATE.name)
