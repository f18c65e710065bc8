"""What one pass over numbers or texts keeps of them, in bounded memory; passes are merged.

Of numbers that is mean and variance (Chan, Golub, LeVeque, "Updating formulae", 1979): the
difference of two sums of squares would lose all digits of numbers with a large mean.

Texts are counted, exactly up to `limit` different ones. Beyond it those seen least are left out
("Lossy counting", Manku and Motwani 2002): a text that comes again later is counted from then on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of the texts that are asked for, so many are counted: what is left out is far from being asked.
_MARGIN = 4


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


class BoundedCounter:
    """Counts of the most frequent texts."""

    def __init__(self, most: int) -> None:
        """Count so that the `most` frequent texts can be told."""
        self._most = most
        self._counts = Counter[bytes]()
        self._left_out = 0

    def add(self, values: Iterable[bytes]) -> None:
        """Count some texts."""
        self._counts.update(values)
        self._prune()

    def add_counts(self, counts: Mapping[bytes, int]) -> None:
        """Count texts that were counted before."""
        self._counts.update(counts)
        self._prune()

    def merge(self, other: BoundedCounter) -> None:
        """Add the counts of further texts."""
        self._counts.update(other._counts)
        self._left_out += other._left_out
        self._prune()

    @property
    def distinct(self) -> int:
        """How many different texts there were; at most so many, where some were left out."""
        return len(self._counts) + self._left_out

    def counts(self) -> dict[str, int]:
        """Return the most frequent texts with their counts, ties by value; UTF-8 alone."""
        ordered = sorted(self._counts.items(), key=lambda each: (-each[1], each[0]))
        found = {}
        for value, count in ordered[: self._most]:
            try:
                found[value.decode()] = count
            except UnicodeDecodeError:
                continue
        return found

    def state(self) -> dict[str, Any]:
        """Return all counts, as JSON has them."""
        counts = {value.decode("latin-1"): count for value, count in self._counts.items()}
        return {"counts": counts, "left_out": self._left_out}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the counts of `state()`."""
        counts = state["counts"].items()
        self._counts = Counter({value.encode("latin-1"): count for value, count in counts})
        self._left_out = state["left_out"]

    def _prune(self) -> None:
        if len(self._counts) <= _MARGIN * self._most:
            return
        kept = sorted(self._counts.items(), key=lambda each: (-each[1], each[0]))
        half = kept[: _MARGIN * self._most // 2]
        self._left_out += len(kept) - len(half)
        self._counts = Counter(dict(half))
