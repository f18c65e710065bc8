"""Recall at k: how many of the items that a user took are among the k that are found for them.

    candidates   all items of the evaluation, whoever they were shown to; of a slice, those in it
    relevant     the items that a user took in it, each once
    vectors      of a user and of an item those of their first example
    score        the dot product of both vectors
    found        an item to which fewer than k other candidates are better; of equal scores at that
                 place the share that is found in a random order, so that a model that scores all
                 alike finds what a random order does
    recall       found of the relevant / all relevant, of a user; the mean is over the users that
                 took something, and users that took nothing do not count
    weight       of a user the mean of those of their examples

The search is exact: all pairs are scored, a block of users at a time. Where there are fewer than k
candidates, or no user took anything, there is no recall at k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flotilla.trainer.tasks.base import Array, Floats

# Scores that are held at once, and about as many bytes more for their order: 64 MiB each.
_AT_ONCE = 1 << 24
Places = npt.NDArray[np.int64]


@dataclass
class Vectors:
    """The vector of each id: that of its first example."""

    _ids: list[Array] = field(default_factory=list)
    _vectors: list[Floats] = field(default_factory=list)

    def add(self, ids: Array, vectors: Floats) -> None:
        """Add examples [n] with their vectors [n, size]."""
        known, first = np.unique(ids, return_index=True)
        self._ids.append(known)
        # A view would keep the whole part.
        self._vectors.append(vectors[first].copy())
        if len(self._ids) > 1 and sum(map(len, self._ids[1:])) > len(self._ids[0]):
            self._merge()

    def all(self) -> tuple[Array, Floats]:
        """Return the ids in order, and their vectors."""
        self._merge()
        return self._ids[0], self._vectors[0]

    def _merge(self) -> None:
        known, first = np.unique(np.concatenate(self._ids), return_index=True)
        self._ids, self._vectors = [known], [np.concatenate(self._vectors)[first]]


class Search:
    """Gathers users, items and what was taken; holds each vector and each taken pair once."""

    def __init__(self) -> None:
        """Begin without examples."""
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
        """How many items there are."""
        return len(self._items.all()[0])

    @property
    def weights(self) -> Floats:
        """What each user that took something weighs, in the order of `recalls`."""
        users, heavy, counts = (np.concatenate(each) for each in zip(*self._weights, strict=True))
        known, place = np.unique(users, return_inverse=True)
        takers = np.isin(known, np.concatenate([users for users, _ in self._taken]))
        found: Floats = (np.bincount(place, heavy) / np.bincount(place, counts))[takers]
        return found

    def recalls(self, numbers: Sequence[int], at_once: int = _AT_ONCE) -> dict[int, Floats]:
        """Return the recall at each number, of each user that took something [users].

        None for a number above that of the candidates. About `at_once` scores are held at once.
        """
        users, of_users = self._users.all()
        items, of_items = self._items.all()
        rows, columns = self._pairs(users, items)
        there = [each for each in numbers if each <= len(items)]
        found = {number: np.zeros(len(rows)) for number in there}
        # Equal vectors have equal scores, whatever the order of their sums.
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
                found[number][pairs] = _found(scores, number, at, own)
        return {number: np.bincount(user, hits) / counts for number, hits in found.items()}

    def _pairs(self, users: Array, items: Array) -> tuple[Places, Places]:
        """Return the places of user and item of each taken pair, by user; each pair once."""
        who, what = (np.concatenate(each) for each in zip(*self._taken, strict=True))
        both = np.searchsorted(users, who) * len(items) + np.searchsorted(items, what)
        return np.divmod(np.unique(both), len(items))


def _found(scores: Floats, number: int, rows: Places, own: Floats) -> Floats:
    """Return the share [n] of the orders in which own scores [n] are among the best of their row.

    The scores are put into another order.
    """
    place = scores.shape[1] - number
    scores.partition(place, axis=1)
    least = scores[:, place, np.newaxis]
    better, equal = (scores > least).sum(axis=1), (scores == least).sum(axis=1)
    share, least = (number - better) / equal, least[:, 0]
    result: Floats = np.where(own > least[rows], 1.0, np.where(own == least[rows], share[rows], 0))
    return result
