"""Recall at k: the share of a user's taken items among the k retrieved items.

    candidates   all items of the evaluation, offered to any user; for a slice, its items
    relevant     the distinct items that a user took
    vectors      those of the first example of a user or an item
    score        the dot product of both vectors
    found        an item with fewer than k better candidates; of tied scores at that rank the share
                 that a random order finds, so that a model with constant scores equals a random
                 order
    recall       found relevant / all relevant items of a user; the mean is over the users with at
                 least one relevant item
    weight       the mean weight of a user's examples

The search is exact: all pairs are scored, a block of users at a time. With fewer than k
candidates, or without relevant items, recall at k is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flotilla.trainer.tasks.base import Array, Floats

# The number of scores in memory: 64 MiB, and about as many bytes for their order.
_AT_ONCE = 1 << 24
Places = npt.NDArray[np.int64]


@dataclass
class Vectors:
    """The vector of each id, taken from its first example."""

    _ids: list[Array] = field(default_factory=list)
    _vectors: list[Floats] = field(default_factory=list)

    def add(self, ids: Array, vectors: Floats) -> None:
        """Add examples [n] with their vectors [n, size]."""
        known, first = np.unique(ids, return_index=True)
        self._ids.append(known)
        # A view would keep the whole part in memory.
        self._vectors.append(vectors[first].copy())
        if len(self._ids) > 1 and sum(map(len, self._ids[1:])) > len(self._ids[0]):
            self._merge()

    def all(self) -> tuple[Array, Floats]:
        """Return the sorted ids, and their vectors."""
        self._merge()
        return self._ids[0], self._vectors[0]

    def _merge(self) -> None:
        known, first = np.unique(np.concatenate(self._ids), return_index=True)
        self._ids, self._vectors = [known], [np.concatenate(self._vectors)[first]]


class Search:
    """Collects users, items and taken pairs; stores each vector and each taken pair once."""

    def __init__(self) -> None:
        """Start without examples."""
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
        """The number of items."""
        return len(self._items.all()[0])

    @property
    def weights(self) -> Floats:
        """The weight of each user with a taken item, in the order of `recalls`."""
        users, heavy, counts = (np.concatenate(each) for each in zip(*self._weights, strict=True))
        known, place = np.unique(users, return_inverse=True)
        takers = np.isin(known, np.concatenate([users for users, _ in self._taken]))
        found: Floats = (np.bincount(place, heavy) / np.bincount(place, counts))[takers]
        return found

    def recalls(self, numbers: Sequence[int], at_once: int = _AT_ONCE) -> dict[int, Floats]:
        """Return the recall at each number, for each user with a taken item [users].

        Numbers above the number of candidates are left out. About `at_once` scores are in memory.
        """
        users, of_users = self._users.all()
        items, of_items = self._items.all()
        rows, columns = self._pairs(users, items)
        there = [each for each in numbers if each <= len(items)]
        found = {number: np.zeros(len(rows)) for number in there}
        # Equal vectors have equal scores, in any order of summation.
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
        """Return the indices of user and item of each distinct taken pair, sorted by user."""
        who, what = (np.concatenate(each) for each in zip(*self._taken, strict=True))
        both = np.searchsorted(users, who) * len(items) + np.searchsorted(items, what)
        return np.divmod(np.unique(both), len(items))


def _share_found(scores: Floats, number: int, rows: Places, own: Floats) -> Floats:
    """Return the probability [n] that own scores [n] are among the best `number` of their row.

    The function permutes the scores in place.
    """
    place = scores.shape[1] - number
    scores.partition(place, axis=1)
    least = scores[:, place, np.newaxis]
    better, equal = (scores > least).sum(axis=1), (scores == least).sum(axis=1)
    share, least = (number - better) / equal, least[:, 0]
    result: Floats = np.where(own > least[rows], 1.0, np.where(own == least[rows], share[rows], 0))
    return result
