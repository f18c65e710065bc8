"""Sketches of examples: a uniform sample, and the smallest hashes.

Both keep the items with the smallest keys ("bottom-k sketches", Cohen and Kaplan 2007), so that
sketches can be merged. The keys of a `Sample` are random. In a sample of 16,384 examples, the rank
of a quantile has a standard error below 0.4%. Up to this number of examples, quantiles are exact.
The keys of `Hashes` are hashes of the inputs, so equal examples have equal keys, even if they are
in different splits or datasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_EXAMPLES = 1 << 14
MOST_HASHES = 1 << 16
# Maximum number of values in a sample, in all columns together.
_MOST_NUMBERS = 1 << 22
_SLACK = 2


class Sample:
    """A uniform random sample of examples, stored by column."""

    def __init__(self, columns: list[str], seed: int | tuple[int, ...]) -> None:
        """Create an empty sample. Each part needs a different seed."""
        self._random = np.random.RandomState(seed)
        self._most = max(256, min(MOST_EXAMPLES, _MOST_NUMBERS // max(1, len(columns))))
        self._keys: list[NDArray[np.float64]] = []
        self._rows: dict[str, list[NDArray[np.float64]]] = {name: [] for name in columns}
        self._held, self._bound = 0, np.inf

    def choose(self, examples: int) -> NDArray[np.intp]:
        """Draw a key for each new example. Return the indices of the examples to pass to `keep`."""
        keys = self._random.random_sample(examples)
        chosen = np.flatnonzero(keys < self._bound)
        self._keys.append(keys[chosen])
        return chosen

    def keep(self, columns: Mapping[str, NDArray[np.float64]]) -> None:
        """Store the values of the chosen examples."""
        for name, held in self._rows.items():
            held.append(columns[name])
        self._held += len(self._keys[-1])
        if self._held > _SLACK * self._most:
            self._shrink()

    def merge(self, other: Sample) -> None:
        """Add the sample of another part."""
        self._keys += other._keys
        for name, held in self._rows.items():
            held.extend(other._rows[name])
        self._held += other._held
        self._shrink()

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the sampled values by column, in random order."""
        self._shrink()
        return {name: held[0] if held else np.empty(0) for name, held in self._rows.items()}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the state as arrays."""
        self._shrink()
        keys = self._keys[0] if self._keys else np.empty(0)
        return {"keys": keys, **{f"row/{name}": each for name, each in self.columns().items()}}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state from `arrays`."""
        self._keys = [arrays["keys"]]
        self._rows = {name: [arrays[f"row/{name}"]] for name in self._rows}
        self._held = len(arrays["keys"])

    def _shrink(self) -> None:
        if not self._keys:
            return
        keys = np.concatenate(self._keys)
        order = np.argsort(keys, kind="stable")[: self._most]
        self._keys = [keys[order]]
        self._rows = {name: [np.concatenate(held)[order]] for name, held in self._rows.items()}
        self._held = len(order)
        if self._held == self._most:
            self._bound = float(self._keys[0][-1])


class Hashes:
    """The smallest hashes of a set of examples, with the number of examples of each.

    The number of distinct hashes is exact up to `most`. Above that, it is estimated from the
    largest of the k kept hashes, because hashes are uniform. The relative standard error is
    1 / sqrt(k - 2) ("On synopses for distinct-value estimation", Beyer et al. 2007).
    """

    def __init__(self, most: int = 0) -> None:
        """Create an empty sketch that keeps `most` hashes. 0 means `MOST_HASHES`."""
        self._most = most or MOST_HASHES
        self._found = np.empty(0, np.uint64)
        self._copies = np.empty(0, np.int64)
        self._pending: list[NDArray[np.uint64]] = []
        self._pending_count = 0
        # Hashes above this bound are not kept.
        self._bound = np.uint64(2**64 - 1)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add the hashes of some examples."""
        small = hashes[hashes <= self._bound]
        self._pending.append(small)
        self._pending_count += len(small)
        if self._pending_count > self._most:
            self._settle()

    def merge(self, other: Hashes) -> None:
        """Add the hashes of another sketch."""
        self._settle()
        other._settle()
        self._bound = min(self._bound, other._bound)
        found = np.concatenate([self._found, other._found])
        self._put(found, np.concatenate([self._copies, other._copies]))

    @property
    def is_whole(self) -> bool:
        """Whether all hashes have been kept."""
        self._settle()
        return bool(self._bound == np.uint64(2**64 - 1))

    def distinct(self, of: int | None = None) -> int:
        """Return the number of distinct hashes. `of` is the number of added hashes, if known."""
        if self.is_whole:
            return len(self._found)
        # If hashes occur about equally often, dividing `of` by their mean count is more accurate
        # than the estimate below.
        if of is not None and self._copies.std() < self._copies.mean():
            return round(of / float(self._copies.mean()))
        found = round((len(self._found) - 1) / (float(self._bound) / 2.0**64))
        return found if of is None else min(found, of)

    def smallest(self) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Return the smallest hashes in ascending order, and the number of examples of each."""
        self._settle()
        return self._found, self._copies

    def arrays(self, prefix: str = "") -> dict[str, NDArray[Any]]:
        """Return the state as arrays, with `prefix` before each name."""
        found, copies = self.smallest()
        arrays = {"hashes": found, "copies": copies, "bound": np.array(self._bound)}
        return {f"{prefix}{name}": each for name, each in arrays.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]], prefix: str = "") -> None:
        """Restore the state from `arrays`."""
        self._found, self._copies = arrays[f"{prefix}hashes"], arrays[f"{prefix}copies"]
        self._bound = np.uint64(arrays[f"{prefix}bound"])

    def _settle(self) -> None:
        if self._pending:
            found, copies = np.unique(np.concatenate(self._pending), return_counts=True)
            self._pending, self._pending_count = [], 0
            self._put(np.concatenate([self._found, found]), np.concatenate([self._copies, copies]))

    def _put(self, found: NDArray[np.uint64], copies: NDArray[np.int64]) -> None:
        """Add up the counts of equal hashes, and keep the smallest hashes."""
        unique, places = np.unique(found, return_inverse=True)
        total = np.bincount(places, copies, len(unique)).astype(np.int64)
        if len(unique) > self._most:
            self._bound = min(self._bound, unique[self._most - 1])
        kept = unique <= self._bound
        self._found, self._copies = unique[kept], total[kept]
