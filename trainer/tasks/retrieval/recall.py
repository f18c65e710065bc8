"""Recall at k: how many of the items that a user took are among the k that are found for them.

    candidates   all items of the evaluation, whoever they were shown to; of a slice, those in it
    relevant     the items that a user took in it, each once
    vectors      of a user and of an item those of their first example
    score        the dot product of both vectors
    found        an item to which fewer than k other candidates are equal or better: equal scores
                 count in the worst order, so that a model that scores all alike finds nothing
    recall       found of the relevant / all relevant, of a user; the mean is over the users that
                 took something, and users that took nothing do not count

The search is exact: all pairs are scored, a block of users at a time. Where there are fewer than k
candidates, or no user took anything, there is no recall at k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trainer.tasks.base import Array, Floats

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

    def add(
        self, users: Array, items: Array, taken: Array, of_users: Floats, of_items: Floats
    ) -> None:
        """Add examples: ids [n], whether the item was taken [n], and vectors [n, size]."""
        self._users.add(users, of_users)
        self._items.add(items, of_items)
        self._taken.append((users[taken], items[taken]))

    @property
    def candidates(self) -> int:
        """How many items there are."""
        return len(self._items.all()[0])

    def recalls(self, numbers: Sequence[int], at_once: int = _AT_ONCE) -> dict[int, Floats]:
        """Return the recall at each number, of each user that took something [users].

        None for a number above that of the candidates. About `at_once` scores are held at once.
        """
        users, of_users = self._users.all()
        items, of_items = self._items.all()
        rows, columns = self._pairs(users, items)
        there = [each for each in numbers if each <= len(items)]
        found = {number: np.zeros(len(rows), np.bool_) for number in there}
        takers, user, counts = np.unique(rows, return_inverse=True, return_counts=True)
        ends, size = np.cumsum(counts), max(1, at_once // max(1, len(items)))
        for begin in range(0, len(takers) if there else 0, size):
            some = takers[begin : begin + size]
            pairs = slice(ends[begin] - counts[begin], ends[begin + len(some) - 1])
            scores = of_users[some] @ of_items.T
            own, least = _against(scores, user[pairs] - begin, columns[pairs], there)
            for place, number in enumerate(there):
                found[number][pairs] = own > least[:, place]
        return {number: np.bincount(user, hits) / counts for number, hits in found.items()}

    def _pairs(self, users: Array, items: Array) -> tuple[Places, Places]:
        """Return the places of user and item of each taken pair, by user; each pair once."""
        who, what = (np.concatenate(each) for each in zip(*self._taken, strict=True))
        both = np.searchsorted(users, who) * len(items) + np.searchsorted(items, what)
        return np.divmod(np.unique(both), len(items))


def _against(
    scores: Floats, rows: Places, columns: Places, numbers: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return the scores [n] of pairs, and what they have to exceed [n, numbers].

    That is the best score but k of the user: fewer than k others are equal or better then.
    """
    own = scores[rows, columns]
    size = scores.shape[1]
    places = [size - 1 - number for number in numbers if number < size]
    if places:
        # The scores are of no other use.
        scores.partition(places, axis=1)
    least = np.full((len(scores), len(numbers)), -np.inf, scores.dtype)
    for at, number in enumerate(numbers):
        if number < size:
            least[:, at] = scores[:, size - 1 - number]
    return own, least[rows]
