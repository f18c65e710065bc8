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
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.config.data import OFF, REFUSE, WARN, DataGateConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.data_gate import (
    drift,
    expected,
    labels,
    leaks,
    page,
    values,
)
from flotilla.trainer.data_gate.findings import Finding, Question, Rule, some
from flotilla.trainer.data_gate.profile import DatasetProfile, make_profile
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import UserError

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
    html = page.render(facts, found, champion.profile)
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
