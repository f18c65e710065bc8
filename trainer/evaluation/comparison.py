"""Compares a challenger with a champion by one metric on the same examples.

The test is a paired non-inferiority test. It gives the difference of the metric, challenger minus
champion, and a one-sided bound. At a confidence of 0.99, the true difference is worse than the
bound in at most 1 of 100 test sets. The bound, not the difference, is compared with the margin, so
that with too few examples a model is refused rather than passed.

    compare_shares   for fractions of correct predictions: Tango's score interval of paired counts
                     (1998, Statistics in Medicine 17); at a difference of 0 it is McNemar's test
    compare_paired   for all other metrics: a t test on the differences between both models in the
                     influence of each example on the metric. For the area under the ROC curve it
                     is the test of DeLong, DeLong and Clarke-Pearson (1988, Biometrics 44)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special

from flotilla.trainer.config.thresholds import ChampionRule, present_name
from flotilla.trainer.evaluation.estimates import Estimate, Metric, Values
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import Examples, Floats
from flotilla.trainer.tasks.objective import Objective

Direction = Literal["higher", "lower"]
# Number of bisections that reduce an interval of length 2 to the rounding error.
_HALVINGS = 50
_TINY = 1e-300


class Compared(NamedTuple):
    """The difference of a metric, challenger minus champion, and its one-sided bound."""

    difference: float
    bound: float
    method: str


class Pairs(NamedTuple):
    """The number of examples for each combination of right and wrong predictions."""

    both_right: int
    only_challenger_right: int
    only_champion_right: int
    both_wrong: int


def compare_shares(pairs: Pairs, confidence: float) -> Compared:
    """Compare two fractions of correct predictions by Tango's score interval."""
    count, own, other = sum(pairs), pairs.only_challenger_right, pairs.only_champion_right
    first, second, third = np.array([[own], [other], [count]], np.float64)
    bound = lower_bounds(first, second, third, confidence)
    return Compared((own - other) / count, float(bound[0]), "Tango's score interval")


def lower_bounds(own: Floats, other: Floats, count: Floats, confidence: float) -> Floats:
    """Return Tango's lower bounds for differences between fractions.

    Args:
        own: for each difference, the number of examples that only the challenger gets right.
        other: the number of examples that only the champion gets right.
        count: the number of all examples, which may be fractional.
        confidence: the confidence of each bound.
    """
    wanted = special.ndtri(confidence)
    # Do not compute the score at -1. It is infinite there, or undefined if all examples were lost.
    low, high = np.full(len(own), -1.0), (own - other) / count
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = _scores(own, other, count, middle) > wanted
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return low


def _scores(own: Floats, other: Floats, count: Floats, assumed: Floats) -> Floats:
    """Return the observed minus the assumed differences, in standard errors."""
    b = (2 * count - own + other) * assumed - own - other
    c = -other * assumed * (1 - assumed)
    likeliest = (np.sqrt(np.maximum(b * b - 8 * count * c, 0)) - b) / (4 * count)
    variance = count * (2 * likeliest + assumed * (1 - assumed))
    excess = own - other - count * assumed
    result: Floats = excess / np.sqrt(np.maximum(variance, _TINY))
    return result


def compare_paired(
    own: Estimate, other: Estimate, confidence: float, better: Direction, lost: float = 0.0
) -> Compared:
    """Compare a metric of two models by the influences of the units.

    If the margin is a fraction of the champion's gain over a constant, `lost` is that fraction.
    This margin varies with the champion's metric, and is therefore not treated as exact.
    """
    sign, difference = (1 if better == "higher" else -1), own.value - other.value
    fewest = min(own.fewest, other.fewest)
    reach = max(
        _reach(sign * (own.influences - kept * other.influences), fewest, confidence)
        for kept in {1.0, 1.0 - lost}
    )
    bound = difference - sign * reach
    return Compared(float(difference), float(bound), "t test of paired influences")


def _reach(terms: Floats, fewest: int, confidence: float) -> float:
    """Return an upper bound for the deviation of a sum of independent terms.

    The degrees of freedom are Satterthwaite's (1946, Biometrics Bulletin 2): there are few if a few
    terms dominate the variance. The correction for skewness is Hall's (1992, J. R. Statist. Soc. B
    54), and is applied only if it widens the bound.
    """
    if fewest <= 1:
        return np.inf
    squares = terms**2
    second, fourth = squares.sum(), (squares**2).sum()
    if second <= _TINY:
        return 0.0
    spread = max(fourth - second**2 / len(terms), _TINY)
    freedom = min(2 * second**2 / spread, fewest - 1)
    wanted = float(special.stdtrit(freedom, confidence))
    skewness = float((squares * terms).sum() / second**1.5)
    if skewness:
        third = 3 / skewness
        wanted = max(wanted, third * (np.cbrt(1 + skewness * wanted - skewness**2 / 6) - 1))
    return float(wanted * np.sqrt(second))


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
        found = compare_shares(pairs, rule.confidence)
    else:
        both = own.estimate(), other.estimate()
        found = compare_paired(*both, rule.confidence, better, rule.share)
    return {
        "metric": metric,
        "better": better,
        "confidence": rule.confidence,
        "examples": opponents.own.count,
        "difference": found.difference if np.isfinite(found.difference) else None,
        "bound": found.bound if np.isfinite(found.bound) else None,
        "method": found.method,
        **({"pairs": pairs._asdict()} if pairs else {}),
    }


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
