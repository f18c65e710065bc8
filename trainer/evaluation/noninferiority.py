"""Paired non-inferiority tests of a challenger against a champion on the same examples.

Each function returns the difference of a metric, challenger minus champion, and a one-sided bound.
At a confidence of 0.99, the true difference is worse than the bound in at most 1 of 100 test sets.
The bound, not the difference, is compared with the margin, so that with too few examples a model is
refused rather than passed.

    shares           for fractions of correct predictions: Tango's score interval of paired counts
                     (1998, Statistics in Medicine 17); at a difference of 0 it is McNemar's test
    compare_paired   for all other metrics: a t test on the differences between both models in the
                     influence of each example on the metric. For the area under the ROC curve it
                     is the test of DeLong, DeLong and Clarke-Pearson (1988, Biometrics 44)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

Direction = Literal["higher", "lower"]
Floats = npt.NDArray[np.floating[Any]]
# Number of bisections that reduce an interval of length 2 to the rounding error.
_HALVINGS = 50
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class Compared:
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


class Estimate(NamedTuple):
    """A metric, and the influence of each unit on it. The influences add up to 0.

    The sum of their squares is the variance of the metric. `fewest` is the number of units that
    limits the precision: all units, or the units of the rarer class.
    """

    value: float
    influences: Floats
    fewest: int

    def sum_units(self, units: npt.NDArray[Any]) -> Estimate:
        """Add up the influences of examples by unit. `units` has the unit of each example."""
        added: Floats = np.bincount(units, self.influences).astype(np.float64)
        return self._replace(influences=added, fewest=min(self.fewest, len(added)))


def mean(values: Floats, weights: Floats | None = None) -> Estimate:
    """Return the weighted mean of values [n], with the influence of each. Weights may be 0."""
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    shares = weights / max(weights.sum(), _TINY)
    value = float(shares @ values)
    fewest = int(np.count_nonzero(weights))
    return Estimate(value, shares * (values - value) * correct_bias(fewest), fewest)


def correct_bias(count: int) -> float:
    """Return the factor that corrects a standard error for a small sample of `count` units."""
    return float(np.sqrt(count / (count - 1))) if count > 1 else 1.0


def shares(pairs: Pairs, confidence: float) -> Compared:
    """Compare two fractions of correct predictions by Tango's score interval."""
    count, own, other = sum(pairs), pairs.only_challenger_right, pairs.only_champion_right
    counts = np.array([[own], [other], [count]], np.float64)
    bound = lower_bounds(counts[0], counts[1], counts[2], confidence)
    return Compared(
        difference=(own - other) / count, bound=float(bound[0]), method="Tango's score interval"
    )


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
    return Compared(
        difference=float(difference), bound=float(bound), method="t test of paired influences"
    )


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
