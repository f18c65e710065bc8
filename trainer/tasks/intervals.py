"""The 95% confidence interval of a metric, computed from its standard error.

The interval lies within the metric's bounds: a fraction is between 0 and 1, an error is at least 0,
and an explained variance is at most 1. Fractions use the log-odds scale and errors the log scale,
with quantiles of Student's t. The standard error is 0 if the observed examples do not vary, for
example if all of a few positive examples are hits. Unseen examples may differ. Therefore the
interval also includes the value that the metric would have if a fraction of the examples were
unseen, as in Wilson's interval (1927) for no hits among n.

`count` is the effective number of examples (Kish 1965, section 11.7).

Standard errors come from sums over weighted examples:

    Moments      for metrics that are means of values of the examples
    Groups       for metrics that are functions of sums: examples are assigned to groups, and the
                 metric is computed again without each group (the jackknife; Quenouille 1949)
    Calibration  for the calibration error of probabilities
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from flotilla.trainer.tasks.metrics import BINS, plain

CONFIDENCE = 0.95
Interval = list[float]
Floats = npt.NDArray[np.floating[Any]]
_OUTSIDE = (1 + CONFIDENCE) / 2
NORMAL = float(special.ndtri(_OUTSIDE))
_TINY = 1e-12
_MOST_GROUPS, _FEWEST_GROUPS, _NUMBERS = 100, 20, 100_000
Doubles = npt.NDArray[np.float64]


def kish(weight: Any, squares: Any) -> Any:
    """Return the effective sample size, from the sums of weights and of squared weights."""
    weight, squares = np.asarray(weight, np.float64), np.asarray(squares, np.float64)
    return np.divide(weight**2, squares, out=np.zeros_like(weight), where=squares > 0)


def wilson(share: Any, count: Any, normal: float = NORMAL) -> tuple[Any, Any]:
    """Return the ends of the score intervals of fractions (Wilson 1927, J. Am. Stat. Assoc. 22).

    Unlike SciPy's version, accept fractional counts. Without examples, the interval is 0 to 1.
    """
    share, count = np.asarray(share, np.float64), np.asarray(count, np.float64)
    inside = np.maximum(share * (1 - share), 0) * count + normal**2 / 4
    margin = normal * np.sqrt(inside) / (count + normal**2)
    near = middle(share, count, normal)
    return np.maximum(near - margin, 0), np.minimum(near + margin, 1)


def middle(share: Any, count: Any, normal: float = NORMAL) -> Any:
    """Return the midpoint of Wilson's score interval of a fraction."""
    return (share * count + normal**2 / 2) / (count + normal**2)


def share_interval(share: float, count: float) -> Interval:
    """Return the interval of a fraction of the examples."""
    return [float(each) for each in wilson(share, count)]


def metric_interval(
    value: float, error: float, count: float, unseen: Sequence[float] = (0, 1)
) -> Interval:
    """Return the interval of a metric in [0, 1]. `unseen` lists possible values on unseen data."""
    if not count > 1:
        return [0.0, 1.0]
    ends = [value]
    if error > 0 and _TINY < value < 1 - _TINY:
        odds, slope = special.logit(value), value * (1 - value)
        margin = _t(count) * error / slope
        ends += [special.expit(odds - margin), special.expit(odds + margin)]
    share = NORMAL**2 / (count + NORMAL**2)
    ends += [value + share * (other - value) for other in unseen]
    return [float(min(ends)), float(max(ends))]


def above_zero(value: float, error: float, count: float, unseen: float = 0.0) -> Interval | None:
    """Return the interval of a metric that is at least 0 and has no upper bound.

    The result is None if `count` is at most 1, or if the value or the error is not finite.
    """
    if not (count > 1 and np.isfinite([value, error]).all()):
        return None
    # Limit the exponent, so that `exp` does not overflow. The bound is practically infinite then.
    margin = min(_t(count) * error / value, 300.0) if value > 0 else 0.0
    share = NORMAL**2 / (count + NORMAL**2)
    high = max(value * math.exp(margin), value + share * (unseen - value))
    return [float(value * math.exp(-margin)), float(high)]


def below_one(value: float, error: float, count: float) -> Interval | None:
    """Return the interval of a metric that is at most 1, or None in the cases of `above_zero`."""
    found = above_zero(1 - value, error, count)
    return [1 - found[1], 1 - found[0]] if found else None


def mean_interval(values: Floats, ends: Sequence[Floats], inflation: float) -> Interval:
    """Return the interval of the mean of values between 0 and 1 (Zou and Donner 2008).

    `ends` are the lower and the upper ends of the values' intervals. Their squared distances from
    the values are added, and `inflation` corrects the sum for dependent values.
    """
    low, high = (
        float(np.sqrt(inflation * ((end - values) ** 2).sum())) / len(values) for end in ends
    )
    return [max(float(values.mean()) - low, 0.0), min(float(values.mean()) + high, 1.0)]


def _t(count: float) -> float:
    return float(special.stdtrit(count - 1, _OUTSIDE))


class Moments:
    """Weighted means of example values, and their standard errors."""

    def __init__(self) -> None:
        """Create empty sums."""
        self._near: Any = None
        self._weight = self._squares = 0.0
        self._first = self._squared_first = self._second = np.zeros(0)

    def add(self, values: Floats, weights: Floats) -> None:
        """Add examples: values [values, n], weights [n]."""
        values, weights = values.astype(np.float64), weights.astype(np.float64)
        if self._near is None:
            # Center the values, because squares of values far from 0 lose precision.
            self._near = values.mean(axis=1)
            self._first = self._squared_first = self._second = np.zeros(len(values))
        centred, squares = values - self._near[:, np.newaxis], weights**2
        self._weight += weights.sum()
        self._squares += squares.sum()
        self._first = self._first + centred @ weights
        self._squared_first = self._squared_first + centred @ squares
        self._second = self._second + centred**2 @ squares

    @property
    def count(self) -> float:
        """The effective number of examples."""
        return float(kish(self._weight, self._squares))

    def result(self) -> tuple[list[float], list[float]]:
        """Return the means and their standard errors."""
        mean, count = self._first / self._weight, self.count
        spread = self._second - 2 * mean * self._squared_first + mean**2 * self._squares
        error = np.sqrt(np.maximum(spread, 0)) / self._weight
        few = np.sqrt(count / (count - 1)) if count > 1 else 1.0
        return (self._near + mean).tolist(), (error * few).tolist()


class Groups:
    """Sums over groups of examples. The examples are assigned to the groups round-robin."""

    def __init__(self, size: int) -> None:
        """Create empty sums for examples of `size` numbers. The first number is the weight."""
        groups = int(np.clip(_NUMBERS // size, _FEWEST_GROUPS, _MOST_GROUPS))
        self._sums, self._next = np.zeros((groups, size)), 0

    def add(self, values: Doubles) -> None:
        """Add examples [n, size]."""
        groups, size = self._sums.shape
        dealt = np.pad(values, ((0, -len(values) % groups), (0, 0))).reshape(-1, groups, size)
        self._sums += np.roll(dealt.sum(axis=0), self._next, axis=0)
        self._next = (self._next + len(values)) % groups

    @property
    def total(self) -> Doubles:
        """The sums over all examples [size]."""
        found: Doubles = self._sums.sum(axis=0)
        return found

    def errors(self, function: Callable[[Doubles], Doubles]) -> list[float]:
        """Return the jackknife errors of the metrics that `function` computes from the sums."""
        some = self._sums[self._sums[:, 0] > 0]
        without = function(self.total - some)
        spread = ((without - without.mean(axis=0)) ** 2).sum(axis=0)
        found: list[float] = np.sqrt(spread * (len(some) - 1) / max(len(some), 1)).tolist()
        return found


class Calibration:
    """Expected calibration error: the mean of |probability - fraction of true labels|.

    The mean is over bins of equal width, weighted by the examples in them (Guo et al. 2017).
    """

    def __init__(self) -> None:
        """Create empty sums."""
        self._sums = np.zeros((4, BINS))

    def add(self, true: Any, sure: Floats, weights: Floats) -> None:
        """Add the probabilities `sure` [n] of events, and `true` [n]: whether they occurred."""
        place = np.minimum((sure * BINS).astype(np.int64), BINS - 1)
        each = (weights, weights * sure, weights * true, weights**2)
        self._sums += [np.bincount(place, one, BINS) for one in each]

    def _bins(self) -> tuple[Doubles, ...]:
        weight, sure, true, squares = self._sums[:, self._sums[0] > 0]
        return weight, sure / weight, true / weight, squares

    def error(self) -> float:
        """Return the calibration error."""
        weight, sure, true, _ = self._bins()
        return float(weight @ np.abs(sure - true) / weight.sum())

    def interval(self) -> Interval:
        """Return the interval of the error, computed from intervals of the fractions in the bins.

        Bins that deviate only by chance do not raise the lower end.
        """
        weight, sure, true, squares = self._bins()
        shares, away, count = weight / weight.sum(), np.abs(sure - true), len(weight)
        of_all = -float(special.ndtri((1 - CONFIDENCE) / 2 / count))
        low, high = wilson(true, kish(weight, squares), of_all)
        least = np.maximum(np.maximum(low - sure, sure - high), 0)
        low, high = wilson(true, kish(weight, squares))
        most = np.maximum(np.abs(low - sure), np.abs(high - sure))
        error = self.error()
        upper = error + float(np.sqrt(((shares * (most - away)) ** 2).sum()))
        return [min(float(shares @ least), error), min(upper, 1.0)]

    def curve(self) -> list[dict[str, float]]:
        """Return the `confidence`, the `accuracy` and the number of `examples` of each bin."""
        return [
            {"confidence": float(sure), "accuracy": float(true), "examples": plain(weight)}
            for weight, sure, true, _ in zip(*self._bins(), strict=True)
        ]
