"""What a rule says of a dataset, and how a rule is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trainer.config.data_gate import DataGateConfig
from trainer.config.thresholds import GateConfig
from trainer.data_gate.expected import ExpectedFeatures
from trainer.data_gate.profile import DatasetProfile, FeatureProfile

#: What a value is written as where it is no number.
Value = float | int | str | None


@dataclass(frozen=True)
class Finding:
    """What is wrong with a dataset by one rule.

    Attributes:
        rule: one of `trainer.config.data_gate.RULES`.
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


def _plain(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the rules judge: a dataset, the champion's if there is one, limits, and the schema file.

    `gate` is the policy on the metrics of the model.
    """

    dataset: DatasetProfile
    champion: DatasetProfile | None
    limits: DataGateConfig
    gate: GateConfig
    schema: ExpectedFeatures | None = None

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


Rule = Callable[[Question], Iterator[Finding]]


def share(part: float, whole: float) -> float:
    """Return a share; 0 of nothing."""
    return part / whole if whole else 0.0


def percent(value: float) -> str:
    """Return a share as a person reads it."""
    return f"{100 * value:.3g} %"


def some(names: list[str], most: int = 5) -> str:
    """Return the first of these names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
