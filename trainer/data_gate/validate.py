"""Hold a dataset against its rules, and publish what was found.

The validation is a published directory:

    validation.json   {"decision": "accepted" | "refused", "reasons": [a line for each finding that
                      refuses], "warnings": [likewise], "findings": [{"rule", "feature", "split",
                      "value", "limit", "champion", "says", "action"}], "dataset": URI,
                      "champion": {"version", "dataset", "note"}, "examples": {split: number}}
    page.html         the same for a person, with the distribution of each feature
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.config.data_gate import OFF, REFUSE, WARN, DataGateConfig
from trainer.config.schema import Config
from trainer.data_gate import drift, examples, labels, page, relations, structure, values
from trainer.data_gate.findings import Finding, Question, Rule
from trainer.data_gate.profile import DatasetProfile, profile_of
from trainer.errors import UserError
from trainer.promotion import registry

KIND = "validation"
ACCEPTED, REFUSED = "accepted", "refused"
FILE, PAGE = "validation.json", "page.html"
_RULES: tuple[Rule, ...] = (
    structure.features, structure.sizes, values.missing, values.constant, labels.classes,
    labels.shares, examples.leakage, examples.duplicates, relations.association,
    relations.label_leakage, values.unit, values.beyond, values.new_values, drift.by_feature,
    drift.together, drift.between_splits,
)  # fmt: skip
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Opponent:
    """The champion's dataset; `note` says why there is none to compare with."""

    version: int = 0
    uri: str = ""
    note: str = ""
    profile: DatasetProfile | None = None


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What was found, and where it is published."""

    uri: str
    accepted: bool
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    page: bytes


def opponent(root: str, name: str) -> Opponent:
    """Return the dataset of the champion of a name, as far as it is still there."""
    number = registry.champion_number(root, name)
    if not number:
        return Opponent(note=f"{name} has no champion yet")
    try:
        champion = registry.promoted_version(root, name, number)
        uri = str(champion.manifest.fields.get("lineage", {}).get("dataset", ""))
        if not uri:
            return Opponent(version=number, note=f"version {number} names no dataset")
        return Opponent(version=number, uri=uri, profile=profile_of(uri))
    except storage.Unavailable:
        raise
    except UserError as error:
        return Opponent(version=number, note=f"nothing to compare with: {error}")


def check(config: Config, dataset: str, champion: Opponent, output: str) -> Validation:
    """Hold the dataset at a URI against the rules; publish what was found at the URI `output`.

    Raises:
        UserError: the dataset, or the schema file, cannot be read.
    """
    found = profile_of(dataset)
    rules = config.data.gate
    question = Question(dataset=found, champion=champion.profile, limits=rules, gate=config.gate)
    findings = findings_of(question)
    tree = _tree(findings, rules, found, champion)
    content = page.render(tree, found, champion.profile)
    with tempfile.TemporaryDirectory(prefix="validation-") as folder:
        text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
        Path(folder, FILE).write_text(text + "\n", encoding="utf-8")
        Path(folder, PAGE).write_bytes(content)
        fields = {"decision": tree["decision"], "dataset": dataset, "champion": champion.uri}
        storage.publish(Path(folder), output, kind=KIND, fields=fields)
    for line in tree["warnings"]:
        _log.warning("%s", line)
    return Validation(
        uri=output,
        accepted=tree["decision"] == ACCEPTED,
        reasons=tuple(tree["reasons"]),
        warnings=tuple(tree["warnings"]),
        page=content,
    )


def findings_of(question: Question) -> list[Finding]:
    """Return what all rules find that are not off."""
    found = (finding for rule in _RULES for finding in rule(question))
    return [each for each in found if question.limits.action(each.rule) != OFF]


def _tree(
    findings: Sequence[Finding], rules: DataGateConfig, dataset: DatasetProfile, champion: Opponent
) -> dict[str, Any]:
    lines = {
        action: [
            f"{each.rule}: {each.says}" for each in findings if rules.action(each.rule) == action
        ]
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
