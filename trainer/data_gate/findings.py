"""What a rule says of a dataset, and how a rule is written."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from flotilla.trainer.config.data import SplitsConfig
from flotilla.trainer.config.data_gate import REFUSE, WARN, DataGateConfig
from flotilla.trainer.config.thresholds import GateConfig
from flotilla.trainer.data_gate.expected import ExpectedFeatures
from flotilla.trainer.data_gate.profile import DatasetProfile, FeatureProfile

# Of YAML: needs no quotes as an element of a list, unless it is a word for another type.
_PLAIN = re.compile(r"(?!(?:yes|no|on|off|true|false|null|y|n)$)[A-Za-z_][\w.-]*", re.IGNORECASE)
#: What a value is written as where it is no number.
Value = float | int | str | None


@dataclass(frozen=True)
class Finding:
    """What is wrong with a dataset by one rule.

    Attributes:
        rule: one of `flotilla.trainer.config.data_gate.RULES`.
        says: one sentence: what is wrong, and what to do.
        feature: the feature, or empty; likewise `split`.
        value: what was found.
        limit: what is allowed, or None.
        champion: what the champion's dataset has, or None.
    """

    rule: str
    says: str
    feature: str = ""
    split: str = ""
    value: Value = None
    limit: Value = None
    champion: Value = None

    def to_json(self, action: str) -> dict[str, Any]:
        """Return the finding with what is done about it; a number that is not finite is a text."""
        tree = {name: _plain(value) for name, value in asdict(self).items()}
        return {**tree, "action": action}

    def line(self, action: str) -> str:
        """Return it as one line that names a key by which it is answered."""
        says = " ".join(self.says.split())
        if "data." in says or "gate." in says:
            return f"{self.rule}: {says}"
        word, does = (WARN, "lets it pass") if action == REFUSE else ('"off"', "silences it")
        return f"{self.rule}: {says}; data.gate.rules: {{{self.rule}: {word}}} {does}"


def _plain(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the rules judge: a dataset, the champion's if there is one, limits, and the schema file.

    `gate` is the policy on the metrics of the model, `splits` is what the splits are drawn by.
    """

    dataset: DatasetProfile
    champion: DatasetProfile | None
    limits: DataGateConfig
    gate: GateConfig
    schema: ExpectedFeatures | None = None
    splits: SplitsConfig = field(default_factory=SplitsConfig)

    @property
    def significance(self) -> float:
        """How probable a finding by chance may be, for one rule and one dataset."""
        return self.limit("significance")

    def limit(self, name: str) -> float:
        """Return a limit by its name."""
        return self.limits.limit(name)

    def pairs(self, split: str = "train") -> Iterator[tuple[str, FeatureProfile, FeatureProfile]]:
        """Yield name and profile of each feature of a split that both datasets have of one kind."""
        known = self.champion.features(split) if self.champion else {}
        for name, found in self.dataset.features(split).items():
            if name in known and found.kind == known[name].kind:
                yield name, found, known[name]

    @property
    def group(self) -> str:
        """The feature whose equal values stay in one split; empty where equal inputs do."""
        drawn = self.splits.time or self.splits.column
        return self.splits.group or ("" if drawn else self.dataset.group)

    def is_of_splits(self, name: str) -> bool:
        """Say whether a feature differs between the splits because it is what makes them."""
        made_by = (self.splits.column, self.splits.time, self.group)
        return any(each and f"{name}/".startswith(f"{each}/") for each in made_by)

    def independent(self, dataset: DatasetProfile, split: str, *, by_inputs: bool) -> float:
        """Return as how many examples drawn one by one those of a split are.

        Examples of one group, or where splits are drawn by the inputs those with equal ones, came
        together: with m of each it is the number of groups, the sum of m over groups squared by the
        sum of squares ("Survey Sampling", Kish 1965).
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
    """Return a share; 0 of nothing."""
    return part / whole if whole else 0.0


def percent(value: float) -> str:
    """Return a share as a person reads it."""
    return f"{100 * value:.3g} %"


def advise_dropping(name: str) -> str:
    """Return the words that say how to leave a column out."""
    plain = name if _PLAIN.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    return f"set data.drop: [{plain}]"


def some(names: list[str], most: int = 5) -> str:
    """Return the first of these names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
