"""Compares a challenger with a champion by one metric on the same examples."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flotilla.trainer.config.thresholds import ChampionRule, present_name
from flotilla.trainer.evaluation import noninferiority
from flotilla.trainer.evaluation.estimates import Metric, Values
from flotilla.trainer.evaluation.noninferiority import Direction, Pairs
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import Examples
from flotilla.trainer.tasks.objective import Objective

_KEY = "gate.champion"


@dataclass(frozen=True, kw_only=True)
class Opponents:
    """Predictions of two models for the same examples, in the same order and parts.

    `theirs` is the objective of the other model, if its decision thresholds differ.
    """

    objective: Objective
    own: Examples
    other: Examples
    theirs: Objective | None = None

    @property
    def others(self) -> Objective:
        """The objective of the other model."""
        return self.theirs or self.objective


def compare(opponents: Opponents, rule: ChampionRule) -> dict[str, Any]:
    """Compare the models by a rule's metric. Raises `UserError`.

    The result has `metric`, `better`, `difference`, `bound`, `confidence`, `method` and `examples`,
    and also `pairs` if each prediction is either right or wrong.
    """
    metric = rule.metric or opponents.objective.main_metric
    own = Metric.make(opponents.objective, opponents.own, metric)
    other = Metric.make(opponents.others, opponents.other, metric)
    better = _direction(opponents.objective, metric, rule)
    pairs = _pairs(own.values, other.values) if better == "higher" and own.units is None else None
    if pairs:
        found = noninferiority.shares(pairs, rule.confidence)
    else:
        both = own.estimate(), other.estimate()
        found = noninferiority.compare_paired(*both, rule.confidence, better, rule.share)
    return {
        "metric": metric,
        "better": better,
        "confidence": rule.confidence,
        "examples": opponents.own.count,
        **{name: _drop_undefined(value) for name, value in asdict(found).items()},
        **({"pairs": pairs._asdict()} if pairs else {}),
    }


def _drop_undefined(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _direction(objective: Objective, metric: str, rule: ChampionRule) -> Direction:
    known = objective.directions
    if metric not in known:
        hint = present_name(metric, known)
        raise ConfigError(
            f"{_KEY}.metric: {metric!r} is not measured{hint} (measured: {', '.join(known)})"
        )
    better = rule.better or known[metric]
    if not better:
        raise ConfigError(
            f"{_KEY}.better: cannot tell whether a higher or lower value of {metric!r} is better; "
            "set the key to higher or lower"
        )
    return better


# Whether the challenger and the champion are right, in the order of `Pairs`.
_WHO = ((1, 1), (1, 0), (0, 1), (0, 0))


def _pairs(own: Values | None, other: Values | None) -> Pairs | None:
    """Count the pairs. Return None if a weight is not 1, or a value is neither 0 nor 1."""
    if own is None or other is None or not (own[1] == 1).all():
        return None
    if not all(np.isin(values, (0, 1)).all() for values, _ in (own, other)):
        return None
    return Pairs(*(int(((own[0] == a) & (other[0] == b)).sum()) for a, b in _WHO))
