"""The gate: is a model good enough to leave?

The decision is a published directory with `decision.json`:

    {"decision": "blessed" | "refused", "reasons": [one line each],
     "rules": [{"metric", "bound": "min" | "max", "threshold", "value", "passed"}],
     "evaluation": URI, "global_step"}

A value that is not a finite number stands there as null, and never passes.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer import storage
from trainer.config import Config, GateConfig
from trainer.errors import UserError, nearest

KIND = "decision"
BLESSED = "blessed"
REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One threshold and how the model stands to it."""

    metric: str
    bound: Literal["min", "max"]
    threshold: float
    value: float

    @property
    def passed(self) -> bool:
        """Whether the value keeps to the bound."""
        if not math.isfinite(self.value):
            return False
        if self.bound == "min":
            return self.value >= self.threshold
        return self.value <= self.threshold

    def __str__(self) -> str:
        """Say in one line how the value stands to the threshold."""
        above = self.value > self.threshold
        if not math.isfinite(self.value):
            stands = "is not a finite number: it cannot be held against"
        elif self.passed:
            stands = "keeps to"
        else:
            stands = "is above" if above else "is below"
        return f"{self.metric} {self.value!r} {stands} gate.{self.bound} {self.threshold!r}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the gate decided, and where it is published."""

    uri: str
    blessed: bool
    rules: tuple[Rule, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """One line for each rule that decided: those that failed, or all when all passed."""
        return _reasons(self.rules)


def check(config: Config, evaluation: str, output: str) -> Decision:
    """Hold the evaluated metrics against the thresholds of the configuration.

    Args:
        config: the run's configuration; its `gate` says the rules.
        evaluation: URI of a published evaluation.
        output: URI at which the decision is published; the same decision again is a no-op.

    Raises:
        UserError: a rule names a metric that was not measured, or `evaluation` is none.
    """
    measured = _measured(evaluation)
    rules = _rules(config.gate, measured["metrics"])
    decision = Decision(uri=output, blessed=all(rule.passed for rule in rules), rules=rules)
    _publish(decision, {"evaluation": evaluation, "global_step": measured.get("global_step")})
    return decision


def _measured(uri: str) -> dict[str, Any]:
    kind = storage.read_manifest(uri).kind
    if kind != "evaluation":
        raise UserError(f"{uri} is a {kind} and not an evaluation: pass on what evaluate wrote")
    tree = json.loads(storage.read_file(uri, "metrics.json"))
    if not isinstance(tree, dict) or not isinstance(tree.get("metrics"), dict):
        raise UserError(f"{uri}: metrics.json holds no metrics: evaluate the checkpoint again")
    return tree


def _rules(config: GateConfig, metrics: Mapping[str, Any]) -> tuple[Rule, ...]:
    bounds: tuple[tuple[Literal["min", "max"], Mapping[str, float]], ...] = (
        ("min", config.min),
        ("max", config.max),
    )
    return tuple(
        Rule(
            metric=metric,
            bound=bound,
            threshold=threshold,
            value=_value(metric, f"gate.{bound}.{metric}", metrics),
        )
        for bound, thresholds in bounds
        for metric, threshold in thresholds.items()
    )


def _value(metric: str, key: str, metrics: Mapping[str, Any]) -> float:
    if metric not in metrics:
        hint = nearest(metric, metrics)
        known = ", ".join(sorted(metrics)) or "nothing"
        raise UserError(f"{key}: {metric!r} was not measured{hint} (measured: {known})")
    value = metrics[metric]
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{key}: {metric!r} is {value!r}, which no threshold can be held against")
    return float(value)


def _reasons(rules: tuple[Rule, ...]) -> tuple[str, ...]:
    failed = tuple(str(rule) for rule in rules if not rule.passed)
    return failed or tuple(map(str, rules)) or ("gate.min and gate.max hold no rule",)


def _publish(decision: Decision, origin: Mapping[str, Any]) -> None:
    word = BLESSED if decision.blessed else REFUSED
    tree = {
        "decision": word,
        "reasons": decision.reasons,
        "rules": [_row(rule) for rule in decision.rules],
        **origin,
    }
    with tempfile.TemporaryDirectory(prefix="decision-") as folder:
        text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
        Path(folder, "decision.json").write_text(text + "\n", encoding="utf-8")
        storage.publish(Path(folder), decision.uri, kind=KIND, fields={"decision": word, **origin})


def _row(rule: Rule) -> dict[str, Any]:
    return {
        "metric": rule.metric,
        "bound": rule.bound,
        "threshold": rule.threshold,
        "value": rule.value if math.isfinite(rule.value) else None,
        "passed": rule.passed,
    }
