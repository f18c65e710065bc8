"""Recall at k: the fraction of a user's taken items that are among the k retrieved items.

    candidates   all items of the evaluated examples, or of the slice; the same for every user
    relevant     the distinct items that the user took
    vectors      the vector of a user or an item is that of its first example
    score        the dot product of both vectors
    retrieved    items with fewer than k higher-scored candidates. Items whose scores are tied at
                 rank k count with the probability that a random order retrieves them, so constant
                 scores are as good as a random order
    recall       retrieved relevant items / relevant items of a user, averaged over the users with
                 a relevant item
    weight       the weight of a user is the mean weight of the user's examples

The search is exact: it scores all pairs, one block of users at a time. If there are fewer than k
candidates, or no relevant items, recall at k is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flotilla.trainer.tasks.base import Array, Floats

# Maximum number of scores in memory at a time (64 MiB, and about as much for sorting).
_AT_ONCE = 1 << 24
Places = npt.NDArray[np.int64]


@dataclass
class Vectors:
    """The vector of each id, from the first example with this id."""

    _ids: list[Array] = field(default_factory=list)
    _vectors: list[Floats] = field(default_factory=list)

    def add(self, ids: Array, vectors: Floats) -> None:
        """Add examples: ids [n] and their vectors [n, size]."""
        known, first = np.unique(ids, return_index=True)
        self._ids.append(known)
        self._vectors.append(vectors[first].copy())
        if len(self._ids) > 1 and sum(map(len, self._ids[1:])) > len(self._ids[0]):
            self._merge()

    def all(self) -> tuple[Array, Floats]:
        """Return the sorted ids and their vectors."""
        self._merge()
        return self._ids[0], self._vectors[0]

    def _merge(self) -> None:
        known, first = np.unique(np.concatenate(self._ids), return_index=True)
        self._ids, self._vectors = [known], [np.concatenate(self._vectors)[first]]


class Search:
    """Collects users, items and taken pairs, without duplicates, and computes recalls."""

    def __init__(self) -> None:
        """Create an empty search."""
        self._users, self._items = Vectors(), Vectors()
        self._taken: list[tuple[Array, Array]] = []
        self._weights: list[tuple[Array, Array, Array]] = []

    def add(  # noqa: PLR0913, PLR0917
        self,
        users: Array,
        items: Array,
        taken: Array,
        of_users: Floats,
        of_items: Floats,
        weights: Floats | None = None,
    ) -> None:
        """Add examples: ids [n], whether the item was taken [n], vectors [n, size], weights [n]."""
        known, place, counts = np.unique(users, return_inverse=True, return_counts=True)
        heavy = counts if weights is None else np.bincount(place, weights)
        self._weights.append((known, heavy, counts))
        self._users.add(users, of_users)
        self._items.add(items, of_items)
        self._taken.append((users[taken], items[taken]))

    @property
    def candidates(self) -> int:
        """The number of items that can be retrieved."""
        return len(self._items.all()[0])

    @property
    def weights(self) -> Floats:
        """The weight of each user who took an item, in the order of `recalls`."""
        users, heavy, counts = (np.concatenate(each) for each in zip(*self._weights, strict=True))
        known, place = np.unique(users, return_inverse=True)
        takers = np.isin(known, np.concatenate([users for users, _ in self._taken]))
        found: Floats = (np.bincount(place, heavy) / np.bincount(place, counts))[takers]
        return found

    def recalls(self, numbers: Sequence[int], at_once: int = _AT_ONCE) -> dict[int, Floats]:
        """Return the recalls [users] at each cutoff in `numbers`, for the users who took an item.

        Cutoffs greater than the number of candidates are left out. About `at_once` scores are in
        memory at the same time.
        """
        users, of_users = self._users.all()
        items, of_items = self._items.all()
        rows, columns = self._pairs(users, items)
        there = [each for each in numbers if each <= len(items)]
        found = {number: np.zeros(len(rows)) for number in there}
        # Score equal vectors once, because rounding could otherwise give them different scores.
        as_bytes = np.ascontiguousarray(of_items).view(np.dtype((np.void, of_items[0].nbytes)))
        _, first, same = np.unique(as_bytes.ravel(), return_index=True, return_inverse=True)
        takers, user, counts = np.unique(rows, return_inverse=True, return_counts=True)
        ends, size = np.cumsum(counts), max(1, at_once // max(1, len(items)))
        for begin in range(0, len(takers) if there else 0, size):
            some = takers[begin : begin + size]
            pairs = slice(ends[begin] - counts[begin], ends[begin + len(some) - 1])
            scores = (of_users[some] @ of_items[first].T)[:, same]
            at = user[pairs] - begin
            own = scores[at, columns[pairs]]
            for number in there:
                found[number][pairs] = _share_found(scores, number, at, own)
        return {number: np.bincount(user, hits) / counts for number, hits in found.items()}

    def _pairs(self, users: Array, items: Array) -> tuple[Places, Places]:
        who, what = (np.concatenate(each) for each in zip(*self._taken, strict=True))
        both = np.searchsorted(users, who) * len(items) + np.searchsorted(items, what)
        return np.divmod(np.unique(both), len(items))


def _share_found(scores: Floats, number: int, rows: Places, own: Floats) -> Floats:
    """Return the probability that each score `own` [n] is among the best `number` of its row.

    The scores of each row are permuted in place.
    """
    place = scores.shape[1] - number
    scores.partition(place, axis=1)
    least = scores[:, place, np.newaxis]
    better, equal = (scores > least).sum(axis=1), (scores == least).sum(axis=1)
    share, least = (number - better) / equal, least[:, 0]
    result: Floats = np.where(own > least[rows], 1.0, np.where(own == least[rows], share[rows], 0))
    return result
