"""How much worse than a champion a challenger may be, given both on the same examples.

Each function returns the difference of a metric, challenger less champion, and a one-sided bound:
at a confidence of 0.95 the true difference is worse than the bound in at most 5 of 100 test sets.
"Not worse by a margin" is ruled by the bound and not by the difference, so that too few examples
refuse a model and never pass one.

    shares   who is right on an example, counted in pairs: Tango's score interval (1998,
             Statistics in Medicine 17); at a difference of 0 it is McNemar's test
    means    a metric that is a mean of values of examples: the mean of the paired differences, by
             the bootstrap-t of few examples and by its normal limit of many
    states   any other metric whose states are sums over the examples: states of blocks of examples
             are drawn anew, in pairs, and the metric is made of each draw (Efron 1979)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Direction = Literal["higher", "lower"]
Floats = npt.NDArray[np.floating[Any]]
#: Of more examples the mean of the differences is as good as normal.
FEW = 1000
RESAMPLES = 1000
# The same predictions give the same bound.
_SEED = 0
# Numbers that are drawn at once: some megabytes.
_MOST_DRAWN = 1_000_000


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


class Sums(NamedTuple):
    """What a mean of paired differences d with weights w needs of any number of examples."""

    examples: float = 0.0
    weights: float = 0.0
    first: float = 0.0
    squared_weights: float = 0.0
    squared_first: float = 0.0
    second: float = 0.0

    @classmethod
    def of(cls, differences: Floats, weights: Floats | None = None) -> Sums:
        """Return the sums over the examples."""
        return cls(len(differences), *_terms(differences, weights).sum(axis=0).tolist())

    def plus(self, other: Sums) -> Sums:
        """Return the sums over the examples of both."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


def shares(pairs: Pairs, confidence: float) -> Compared:
    """Compare two shares by the score interval of Tango, of which the higher is better."""
    count, own, other = sum(pairs), pairs.only_challenger_right, pairs.only_champion_right
    wanted = float(stats.norm.ppf(confidence))
    difference = (own - other) / count

    def beyond(assumed: float) -> float:
        return _score(own, other, count, assumed) - wanted

    # At -1 the score is infinite, or not defined where all were lost.
    lowest = -1 + 1e-12
    bound = -1.0
    if beyond(lowest) > 0:
        bound = float(optimize.brentq(beyond, lowest, difference + 1e-12, xtol=1e-10))
    return Compared(difference=difference, bound=bound, method="Tango's score interval")


def _score(own: int, other: int, count: int, assumed: float) -> float:
    """Return how many standard errors the counts are above an assumed difference of the shares."""
    a = 2 * count
    b = (2 * count - own + other) * assumed - own - other
    c = -other * assumed * (1 - assumed)
    likeliest = (np.sqrt(max(b * b - 4 * a * c, 0)) - b) / (2 * a)
    variance = count * (2 * likeliest + assumed * (1 - assumed))
    excess = own - other - count * assumed
    if variance <= 0:
        return float(np.inf if excess > 0 else 0.0)
    return float(excess / np.sqrt(variance))


def means(
    differences: Floats, weights: Floats | None, confidence: float, better: Direction
) -> Compared:
    """Compare two means by the differences [n] of their examples, with weights [n] or None."""
    if len(differences) > FEW:
        return means_of_sums(Sums.of(differences, weights), confidence, better)
    sign = 1 if better == "higher" else -1
    terms = _terms(sign * np.asarray(differences), weights)
    mean, error = _mean_and_error(*terms.sum(axis=0))
    drawn = np.concatenate([counts @ terms for counts in _draws(len(terms))]).T
    means, errors = _mean_and_error(*drawn)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (means - mean) / errors
    # A draw without any spread says nothing of its own error: it counts as the worst.
    t[~(errors > 0)] = np.inf if error else 0
    bound = mean - float(np.quantile(t, confidence, method="higher")) * error if error else mean
    return Compared(
        difference=float(sign * mean), bound=float(sign * bound), method="paired bootstrap-t"
    )


def means_of_sums(sums: Sums, confidence: float, better: Direction) -> Compared:
    """Compare two means of so many examples that the mean of the differences is normal."""
    mean, error = _mean_and_error(*sums[1:])
    sign = 1 if better == "higher" else -1
    bound = mean - sign * stats.norm.ppf(confidence) * error
    return Compared(
        difference=float(mean), bound=float(bound), method="normal limit of the paired differences"
    )


def _terms(differences: Floats, weights: Floats | None) -> Floats:
    d = np.asarray(differences, np.float64)
    w = np.ones_like(d) if weights is None else np.asarray(weights, np.float64)
    return np.stack([w, w * d, w**2, w**2 * d, w**2 * d**2], axis=1)


def _mean_and_error(weights: Any, first: Any, squared: Any, squared_first: Any, second: Any) -> Any:
    """Return a weighted mean and its standard error, of numbers or of arrays of them."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = first / weights
        spread = second - 2 * mean * squared_first + mean**2 * squared
        # What is left of equal values after rounding is no spread.
        spread = np.where(spread > 1e-12 * np.abs(second), spread, 0)
        return mean, np.sqrt(spread) / weights


def states(
    own: Floats,
    other: Floats,
    result: Callable[[Any], float],
    confidence: float,
    better: Direction,
) -> Compared:
    """Compare a metric by the states [blocks, size] that both models have for the same blocks."""
    sign = 1 if better == "higher" else -1
    difference = result(own.sum(axis=0)) - result(other.sum(axis=0))
    drawn = []
    for counts in _draws(len(own)):
        pairs = zip(counts @ own, counts @ other, strict=True)
        drawn += [sign * (result(mine) - result(theirs)) for mine, theirs in pairs]
    found = np.asarray(drawn)
    # Not defined for a draw, such as an area of one class: it counts as the worst.
    found[~np.isfinite(found)] = -np.inf
    low = float(np.quantile(found, 1 - confidence, method="lower"))
    return Compared(difference=float(difference), bound=sign * low, method="paired block bootstrap")


def _draws(size: int) -> Any:
    """Yield how often each of `size` is drawn, for `RESAMPLES` draws: [some, size] at a time."""
    generator = np.random.default_rng(_SEED)
    most = max(_MOST_DRAWN // size, 1)
    even = np.full(size, 1 / size)
    for begin in range(0, RESAMPLES, most):
        yield generator.multinomial(size, even, min(most, RESAMPLES - begin)).astype(np.float64)
