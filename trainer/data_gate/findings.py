"""Findings and inputs of rules, and functions that format messages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flotilla.trainer.config.data import REFUSE, WARN, DataGateConfig, SplitsConfig
from flotilla.trainer.config.thresholds import GateConfig
from flotilla.trainer.data_gate.expected import ExpectedFeatures
from flotilla.trainer.data_gate.profile import DatasetProfile, FeatureProfile

# Names that need no quotes in a YAML list.
_PLAIN = re.compile(r"(?!(?:yes|no|on|off|true|false|null|y|n)$)[A-Za-z_][\w.-]*", re.IGNORECASE)
#: A value in a finding. In JSON, NaN and infinities become strings.
Value = float | int | str | None


@dataclass(frozen=True)
class Finding:
    """A violation of a rule by a dataset.

    Attributes:
        rule: one of `flotilla.trainer.config.data.RULES`.
        says: the problem and a suggested fix, in one sentence.
        feature: name of the feature, or empty. `split` is the name of the split, or empty.
        value: the measured value.
        limit: the allowed value, or None.
        champion: the value in the champion's dataset, or None.
    """

    rule: str
    says: str
    feature: str = ""
    split: str = ""
    value: Value = None
    limit: Value = None
    champion: Value = None

    def to_json(self, action: str) -> dict[str, Any]:
        """Return the finding and its action as JSON values. NaN and infinities become strings."""
        plain = {
            name: str(each) if isinstance(each, float) and not math.isfinite(each) else each
            for name, each in asdict(self).items()
        }
        return {**plain, "action": action}

    def line(self, action: str) -> str:
        """Return the finding as one line, possibly with advice on changing the rule's action."""
        says = " ".join(self.says.split())
        if "data." in says or "gate." in says:
            return f"{self.rule}: {says}"
        word, does = (WARN, "to let it pass") if action == REFUSE else ('"off"', "to silence it")
        return f"{self.rule}: {says}; set data.gate.rules: {{{self.rule}: {word}}} {does}"


@dataclass(frozen=True, kw_only=True)
class Question:
    """The input of a rule: a dataset, the champion's dataset if any, limits, and the schema file.

    `gate` is the policy on the model's metrics, and `splits` is the configuration of the splits.
    """

    dataset: DatasetProfile
    champion: DatasetProfile | None
    limits: DataGateConfig
    gate: GateConfig
    schema: ExpectedFeatures | None = None
    splits: SplitsConfig = field(default_factory=SplitsConfig)

    @property
    def significance(self) -> float:
        """The configured significance level of a rule's tests on one dataset."""
        return self.limit("significance")

    def limit(self, name: str) -> float:
        """Return the configured limit `name`."""
        return self.limits.limit(name)

    def pairs(self, split: str = "train") -> Iterator[tuple[str, FeatureProfile, FeatureProfile]]:
        """Yield the name and both profiles of each feature with the same kind in both datasets."""
        known = self.champion.features(split) if self.champion else {}
        for name, found in self.dataset.features(split).items():
            if name in known and found.kind == known[name].kind:
                yield name, found, known[name]

    @property
    def group(self) -> str:
        """The feature that groups examples when splits are drawn, or "" if there is none."""
        drawn = self.splits.time or self.splits.column
        return self.splits.group or ("" if drawn else self.dataset.group)

    def defines_splits(self, name: str) -> bool:
        """Return whether a feature defines the splits, and therefore differs between them."""
        made_by = (self.splits.column, self.splits.time, self.group)
        return any(each and f"{name}/".startswith(f"{each}/") for each in made_by)

    def independent(self, dataset: DatasetProfile, split: str, *, by_inputs: bool) -> float:
        """Return the effective sample size of a split.

        Examples of a group are dependent. Equal examples are dependent too if the inputs determine
        the split. The effective number of groups is the squared sum of their sizes, divided by the
        sum of their squared sizes ("Survey Sampling", Kish 1965).
        """
        found = dataset.splits[split]
        size = max(found.examples, 1)
        if self.group and self.group in found.sample:
            copies = np.unique(found.sample[self.group], return_counts=True)[1]
            drawn = max(int(copies.sum()), 2)
            pairs = float((copies * (copies - 1)).sum()) / drawn / (drawn - 1)
            return 1 / (pairs * (1 - 1 / size) + 1 / size)
        if not by_inputs or self.splits.column or not len(found.copies):
            return float(size)
        return size * float(found.copies.sum()) / float((found.copies**2).sum())


Rule = Callable[[Question], Iterator[Finding]]


def share(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if the whole is 0."""
    return part / whole if whole else 0.0


def percent(value: float) -> str:
    """Format a share as a percentage."""
    return f"{100 * value:.3g} %"


def advise_dropping(name: str) -> str:
    """Return advice for a message on how to drop a column."""
    plain = name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    return f"set data.drop: [{plain}]"


def some(names: list[str], most: int = 5) -> str:
    """Format up to `most` names, followed by the number of omitted names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
