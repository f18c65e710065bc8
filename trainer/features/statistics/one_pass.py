"""Mergeable one-pass statistics and sketches of examples, in bounded memory.

Mean and variance are merged part by part (Chan, Golub, LeVeque, "Updating formulae", 1979), because
the difference of two sums of squares would lose the digits of numbers with a large mean.

The counts of strings are exact up to a limit of distinct strings. Above it, the rarest are dropped
("Lossy counting", Manku and Motwani 2002). A dropped string that occurs again is counted from 0.

A `Sample` and `Hashes` keep the items with the smallest keys ("bottom-k sketches", Cohen and Kaplan
2007). The keys of a `Sample` are random. In a sample of 16,384 examples, the rank of a quantile has
a standard error below 0.4%. Up to this number of examples, quantiles are exact. The keys of
`Hashes` are hashes of the inputs, so equal examples have equal keys in all splits and datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

#: Strings, as large_binary, with the count of each.
Counted = tuple[pa.Array, NDArray[np.int64]]
OnCounted = Callable[[pa.Array, NDArray[np.int64]], None]
# Number of counted strings per requested string, so that requested strings are rarely dropped.
_MARGIN = 4
# Maximum number of pending strings, and their maximum size in bytes.
_MOST_PENDING, _MOST_BYTES = 1 << 17, 1 << 26
# If integers differ by less than this, their difference does not overflow.
_CLOSE = 2.0**62
# Number of values to sum at a time, so that they fit into the CPU cache.
_PART = 1 << 16


@dataclass
class Moments:
    """Mergeable mean, variance and range of numbers, or of each element of vectors."""

    count: Any = 0
    mean: Any = 0.0
    squares: Any = 0.0
    least: Any = np.inf
    most: Any = -np.inf

    def add(self, values: NDArray[Any]) -> None:
        """Add numbers, or the rows of an array. Values that are not finite are skipped."""
        rows = max(1, _PART * len(values) // max(1, values.size))
        for start in range(0, len(values) if values.size else 0, rows):
            self.merge(_measure(values[start : start + rows]))

    def merge(self, other: Moments) -> None:
        """Add the moments of other numbers."""
        delta = other.mean - self.mean
        both = self.count + other.count
        share = other.count / np.maximum(both, 1)
        self.squares = self.squares + other.squares + delta**2 * self.count * share
        self.mean = self.mean + delta * share
        self.count = both
        self.least = np.minimum(self.least, other.least)
        self.most = np.maximum(self.most, other.most)

    @property
    def std(self) -> Any:
        """The standard deviation, which is exactly 0 for a constant, despite rounding."""
        found = np.sqrt(self.squares / np.maximum(self.count, 1))
        return np.where(self.most > self.least, found, 0.0)[()]

    def state(self) -> list[Any]:
        """Return the state as JSON values, from which `Moments(*state)` restores it."""
        return [np.asarray(each).tolist() for each in astuple(self)]


def _measure(values: NDArray[Any]) -> Moments:
    base: Any = 0
    mask: Any = True
    if values.dtype == np.int64:
        least, most = values.min(0), values.max(0)
        # Subtract the minimum first, because a conversion to floats loses digits of large integers.
        base = np.where(np.float64(most) - least < _CLOSE, least, 0)
        wide = (values - base).astype(np.float64)
    else:
        wide = values.astype(np.float64)
        finite = np.isfinite(wide)
        # Use a mask only if it is needed, because NumPy is faster without one.
        mask = finite if not finite.all() else True
        least = wide.min(0, where=mask, initial=np.inf)
        most = wide.max(0, where=mask, initial=-np.inf)
    count = np.broadcast_to(mask, wide.shape).sum(0)
    mean = wide.sum(0, where=mask) / np.maximum(count, 1)
    with np.errstate(invalid="ignore"):
        squares = ((wide - mean) ** 2).sum(0, where=mask)
    return Moments(count, mean + base, squares, np.float64(least), np.float64(most))


class BoundedCounter:
    """Counts strings. If there are too many distinct strings, the rarest are dropped.

    Attributes:
        is_whole: whether no string was dropped.
    """

    def __init__(self, most: int, on_counted: OnCounted | None = None) -> None:
        """Create an empty counter. `counts` returns up to `most` strings.

        `on_counted` is called with each batch of distinct strings before any of them are dropped.
        """
        self.is_whole = True
        self._most, self._on_counted = most, on_counted
        self._texts = pa.array([], pa.large_binary())
        self._counts = np.empty(0, np.int64)
        self._pending: list[Counted] = []
        self._size = self._bytes = 0

    def add(self, texts: pa.Array, counts: NDArray[np.int64]) -> None:
        """Add strings, an Arrow array of large_binary, with their counts."""
        self._pending.append((texts, counts))
        self._size += len(texts)
        self._bytes += texts.nbytes
        if self._size > _MOST_PENDING or self._bytes > _MOST_BYTES:
            self.settle()

    def settle(self) -> None:
        """Count all pending strings."""
        if self._pending:
            found = _sum(self._pending)
            self._pending, self._size, self._bytes = [], 0, 0
            if self._on_counted:
                self._on_counted(*found)
            self._put(*found)

    def merge(self, other: BoundedCounter) -> None:
        """Add the counts of another counter."""
        self.settle()
        other.settle()
        self.is_whole = self.is_whole and other.is_whole
        self._put(other._texts, other._counts)

    @property
    def distinct(self) -> int:
        """The number of kept strings. If `is_whole` is true, all distinct strings are kept."""
        self.settle()
        return len(self._texts)

    def counts(self) -> dict[str, int]:
        """Return the most frequent strings and their counts, with ties sorted by value.

        Strings that are not valid UTF-8 are left out.
        """
        self.settle()
        chosen = self._rank()[: self._most]
        found = {}
        texts = self._texts.take(pa.array(chosen)).to_pylist()
        for value, count in zip(texts, self._counts[chosen].tolist(), strict=True):
            try:
                found[value.decode()] = count
            except UnicodeDecodeError:
                continue
        return found

    def arrays(self, prefix: str) -> dict[str, NDArray[Any]]:
        """Return the state as arrays, with `prefix` before each name."""
        self.settle()
        content = b"".join(self._texts.to_pylist())
        arrays = {
            "bytes": np.frombuffer(content, np.uint8),
            "lengths": pc.binary_length(self._texts).to_numpy(),
            "counts": self._counts,
            "is_whole": np.array(self.is_whole),
        }
        return {f"{prefix}{name}": each for name, each in arrays.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]], prefix: str) -> None:
        """Restore the state from `arrays`."""
        ends = np.cumsum([0, *arrays[f"{prefix}lengths"]])
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(arrays[f"{prefix}bytes"].tobytes())]
        self._texts = pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers)
        self._counts = arrays[f"{prefix}counts"]
        self.is_whole = bool(arrays[f"{prefix}is_whole"])

    def _put(self, texts: pa.Array, counts: NDArray[np.int64]) -> None:
        """Add counts, and drop the rarest strings above the limit."""
        self._texts, self._counts = _sum([(self._texts, self._counts), (texts, counts)])
        if len(self._texts) > _MARGIN * self._most:
            self.is_whole = False
            kept = self._rank()[: _MARGIN * self._most // 2]
            self._texts, self._counts = self._texts.take(pa.array(kept)), self._counts[kept]

    def _rank(self) -> NDArray[np.int64]:
        """Return the indices of the strings, the most frequent first, with ties sorted by value."""
        table = pa.table({"count": self._counts, "text": self._texts})
        keys = [("count", "descending"), ("text", "ascending")]
        ranks: NDArray[np.int64] = pc.sort_indices(table, keys).to_numpy().astype(np.int64)
        return ranks


def _sum(parts: Sequence[Counted]) -> Counted:
    """Return the distinct strings, each with the sum of its counts."""
    texts, counts = zip(*parts, strict=True)
    coded = pa.concat_arrays(texts).dictionary_encode()
    total = np.bincount(coded.indices, np.concatenate(counts), len(coded.dictionary))
    return coded.dictionary, total.astype(np.int64)


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
