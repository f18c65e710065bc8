"""Mergeable statistics of one pass over numbers or texts, in bounded memory.

Numbers: mean and variance (Chan, Golub, LeVeque, "Updating formulae", 1979), since the difference
of two sums of squares would lose the digits of numbers with a large mean.

Texts: counts, exact up to `limit` distinct ones. Above it the rarest are dropped ("Lossy counting",
Manku and Motwani 2002): a dropped text is counted anew when it appears again. The number of
distinct texts is estimated from their smallest hashes (`sampling.Hashes`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.features.statistics.hashing import hashes
from flotilla.trainer.features.statistics.sampling import MOST_EXAMPLES, Hashes

# Factor of counted over requested texts, so that dropped ones are far from the requested ones.
_MARGIN = 4
_CLOSE = 2**63


@dataclass
class Moments:
    """Sums over numbers."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Add numbers; all of them are finite."""
        if not values.size:
            return
        least, most = values.min().item(), values.max().item()
        # Differences of large integers keep the digits that their floats lose.
        is_close = values.dtype == np.int64 and most - least < _CLOSE
        wide = (values - least if is_close else values).astype(np.float64)
        mean = float(wide.mean())
        squares = float(((wide - mean) ** 2).sum())
        mean += least if is_close else 0
        self.merge(Moments(wide.size, mean, squares, float(least), float(most)))

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
        """The standard deviation; exactly 0 for a constant, despite rounding."""
        return math.sqrt(self.squares / self.count) if self.most > self.least else 0.0

    def state(self) -> list[float]:
        """Return the sums, from which `Moments(*state)` continues."""
        return [self.count, self.mean, self.squares, self.least, self.most]


class BoundedCounter:
    """Counts of the most frequent texts."""

    def __init__(self, most: int) -> None:
        """Begin without texts; `most` frequent texts can be returned."""
        self._most = most
        self._counts = Counter[bytes]()
        # Hashes of all texts, once some were dropped; empty before.
        self._seen = Hashes(MOST_EXAMPLES)

    def add(self, values: Iterable[bytes]) -> None:
        """Count some texts."""
        self._counts.update(values)
        self._prune()

    def add_counts(self, counts: Mapping[bytes, int]) -> None:
        """Add counts of texts."""
        self._counts.update(counts)
        self._prune()

    def merge(self, other: BoundedCounter) -> None:
        """Add the counts of further texts."""
        self._counts.update(other._counts)
        self._seen.merge(other._seen)
        self._prune()

    @property
    def distinct(self) -> int:
        """The number of distinct texts; an estimate once some were dropped."""
        if not self._seen.distinct():
            return len(self._counts)
        self._see()
        return self._seen.distinct()

    def counts(self) -> dict[str, int]:
        """Return the most frequent texts with their counts, ties by value; valid UTF-8 only."""
        ordered = sorted(self._counts.items(), key=lambda each: (-each[1], each[0]))
        found = {}
        for value, count in ordered[: self._most]:
            try:
                found[value.decode()] = count
            except UnicodeDecodeError:
                continue
        return found

    def state(self) -> dict[str, Any]:
        """Return all counts as JSON."""
        counts = {value.decode("latin-1"): count for value, count in self._counts.items()}
        seen = {name: each.tolist() for name, each in self._seen.arrays().items()}
        return {"counts": counts, "seen": seen if self._seen.distinct() else {}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the counts of `state()`."""
        counts = state["counts"].items()
        self._counts = Counter({value.encode("latin-1"): count for value, count in counts})
        if seen := state["seen"]:
            types = {"hashes": np.uint64, "copies": np.int64, "bound": np.uint64}
            self._seen.restore({name: np.array(seen[name], each) for name, each in types.items()})

    def _prune(self) -> None:
        if len(self._counts) <= _MARGIN * self._most:
            return
        self._see()
        kept = sorted(self._counts.items(), key=lambda each: (-each[1], each[0]))
        self._counts = Counter(dict(kept[: _MARGIN * self._most // 2]))

    def _see(self) -> None:
        texts = np.empty(len(self._counts), object)
        texts[:] = list(self._counts)
        self._seen.add(hashes({"": texts}, 0))
