"""Mean and variance in one pass: Chan, Golub, LeVeque, "Updating formulae" (1979).

The difference of two sums of squares would lose all digits of numbers with a large mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Moments:
    """Sums over some numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Add numbers, all of them finite or not missing."""
        if not values.size:
            return
        wide = values.astype(np.float64)
        mean = float(wide.mean())
        squares = float(((wide - mean) ** 2).sum())
        self.merge(Moments(wide.size, mean, squares, float(wide.min()), float(wide.max())))

    def merge(self, other: Moments) -> None:
        """Add the sums over further numbers."""
        if not other.count:
            return
        delta = other.mean - self.mean
        both = self.count + other.count
        self.squares += other.squares + delta**2 * self.count * other.count / both
        self.mean += delta * other.count / both
        self.count = both
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)

    @property
    def std(self) -> float:
        """The standard deviation; a constant has none, whatever its sum is rounded to."""
        return math.sqrt(self.squares / self.count) if self.most > self.least else 0.0

    def state(self) -> list[float]:
        """Return all sums, by which `Moments(*state)` continues."""
        return [self.count, self.mean, self.squares, self.least, self.most]
