"""Sums over weighted examples, for metrics and their standard errors.

Moments       for metrics that are means of values of the examples
Groups        for metrics that are functions of sums: examples are assigned to groups, and the
              metric is computed again without each group (the jackknife; Quenouille 1949)
Calibration   for the calibration error of probabilities
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from flotilla.trainer.tasks.exact import intervals
from flotilla.trainer.tasks.exact.intervals import Interval
from flotilla.trainer.tasks.metrics import BINS, plain

_MOST_GROUPS, _FEWEST_GROUPS, _NUMBERS = 100, 20, 100_000
Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]


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
        return float(intervals.kish(self._weight, self._squares))

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
        of_all = -float(special.ndtri((1 - intervals.CONFIDENCE) / 2 / count))
        low, high = intervals.wilson(true, intervals.kish(weight, squares), of_all)
        least = np.maximum(np.maximum(low - sure, sure - high), 0)
        low, high = intervals.wilson(true, intervals.kish(weight, squares))
        most = np.maximum(np.abs(low - sure), np.abs(high - sure))
        error = self.error()
        upper = error + float(np.sqrt(((shares * (most - away)) ** 2).sum()))
        return [min(float(shares @ least), error), min(upper, 1.0)]

    def curve(self) -> list[dict[str, float]]:
        """Return the `confidence`, the `accuracy` and the number of `examples` of each bin."""
        return [
            {
                "confidence": float(sure),
                "accuracy": float(true),
                "examples": plain(weight),
            }
            for weight, sure, true, _ in zip(*self._bins(), strict=True)
        ]
