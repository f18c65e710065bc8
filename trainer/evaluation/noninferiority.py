"""How much worse than a champion a challenger may be, given both on the same examples.

Each function returns the difference of a metric, challenger less champion, and a one-sided bound:
at a confidence of 0.99 the true difference is worse than the bound in at most 1 of 100 test sets.
"Not worse by a margin" is ruled by the bound and not by the difference, so that too few examples
refuse a model and never pass one.

    shares   who is right on an example, counted in pairs: Tango's score interval (1998,
             Statistics in Medicine 17); at a difference of 0 it is McNemar's test
    paired   any other metric: a t test of the differences of what each example adds to the metric
             of both (its influence); of the area under the ROC it is that of DeLong, DeLong and
             Clarke-Pearson (1988, Biometrics 44)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Direction = Literal["higher", "lower"]
Floats = npt.NDArray[np.floating[Any]]
# Halvings of an interval of length 2, until it is as short as a rounding error.
_HALVINGS = 50
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A difference, challenger less champion, and the bound on the worse side of it."""

    difference: float
    bound: float
    method: str


class Pairs(NamedTuple):
    """Examples by who is right on them."""

    both_right: int
    only_challenger_right: int
    only_champion_right: int
    both_wrong: int


class Estimate(NamedTuple):
    """A metric, and what each unit of the examples adds to it: the influences, whose sum is 0.

    The sum of their squares is the variance of the metric. `fewest` is the number of units that
    its precision depends on: all, or those of the rarer class.
    """

    value: float
    influences: Floats
    fewest: int

    def of_units(self, units: npt.NDArray[Any]) -> Estimate:
        """Return what all examples of a unit add, by the number of the unit of each example."""
        added: Floats = np.bincount(units, self.influences).astype(np.float64)
        return self._replace(influences=added, fewest=min(self.fewest, len(added)))


def mean(values: Floats, weights: Floats | None = None) -> Estimate:
    """Return a mean of values [n] with weights [n], of which some may be 0."""
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    shares = weights / max(weights.sum(), _TINY)
    value = float(shares @ values)
    fewest = int(np.count_nonzero(weights))
    return Estimate(value, shares * (values - value) * correct_bias(fewest), fewest)


def correct_bias(count: int) -> float:
    """Return how much larger the standard error of so many units is than their spread."""
    return float(np.sqrt(count / (count - 1))) if count > 1 else 1.0


def shares(pairs: Pairs, confidence: float) -> Compared:
    """Compare two shares by the score interval of Tango, of which the higher is better."""
    count, own, other = sum(pairs), pairs.only_challenger_right, pairs.only_champion_right
    counts = np.array([[own], [other], [count]], np.float64)
    bound = lower_bounds(counts[0], counts[1], counts[2], confidence)
    return Compared(
        difference=(own - other) / count, bound=float(bound[0]), method="Tango's score interval"
    )


def lower_bounds(own: Floats, other: Floats, count: Floats, confidence: float) -> Floats:
    """Return Tango's bounds of several differences of shares.

    Args:
        own: examples that the challenger alone is right on, of each difference.
        other: those that the champion alone is right on.
        count: all examples, also wrong or right by both; need not be whole numbers.
        confidence: of each bound.
    """
    wanted = special.ndtri(confidence)
    # At -1 the score is infinite, or not defined where all were lost.
    low, high = np.full(len(own), -1.0), (own - other) / count
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = _scores(own, other, count, middle) > wanted
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return low


def _scores(own: Floats, other: Floats, count: Floats, assumed: Floats) -> Floats:
    """Return how many standard errors the counts are above assumed differences of the shares."""
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
    """Compare a metric by what each unit adds to that of both models.

    `lost` is the share of what the champion gains that may be lost, where the margin is such a
    share: it varies with the champion's metric, and is never taken for surer than a number.
    """
    sign, difference = (1 if better == "higher" else -1), own.value - other.value
    fewest = min(own.fewest, other.fewest)
    reach = max(
        _reach(sign * (own.influences - kept * other.influences), fewest, confidence)
        for kept in {1.0, 1.0 - lost}
    )
    bound = difference - sign * reach
    return Compared(
        difference=float(difference), bound=float(bound), method="t test of paired influences"
    )


def _reach(terms: Floats, fewest: int, confidence: float) -> float:
    """Return how far the sum of independent terms may be above its expectation.

    The degrees of freedom are those of Satterthwaite (1946, Biometrics Bulletin 2): few where a few
    terms make up most of the variance. The correction for skewness is that of Hall (1992, J. R.
    Statist. Soc. B 54), where it is on the safe side.
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
