"""Recommendations without a neural network: popularity, and item-item similarity.

Popularity recommends the most frequently taken items to every user. Item-item scores an item by the
sum of its cosine similarities to the items that the user took (Sarwar et al. 2001, "Item-based
collaborative filtering"). The similarities come from a truncated SVD (Cremonesi et al. 2010,
"PureSVD").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse

from flotilla.trainer.baselines.fitting import Answer
from flotilla.trainer.baselines.rows import Clock, NoBaselineError, Rows
from flotilla.trainer.tasks.base import Array, Floats
from flotilla.trainer.tasks.retrieval.recommendation import Recommendation

#: Number of dimensions of an item vector.
FACTORS = 64
_FEWEST_FACTORS = 2
# Number of pseudo-examples per item for smoothing. They have the mean positive rate of all items.
_PRIOR = 10.0


class _Taken:
    def __init__(self, task: Recommendation, rows: Rows) -> None:
        self._columns = task.columns
        taken = rows.labels.astype(bool).reshape(-1)
        self.taken, self.weights = taken, rows.weights
        (self.users, self.user), (self.items, self.item) = (
            np.unique(rows.columns[name], return_inverse=True) for name in task.columns
        )
        offered = np.bincount(self.item, self.weights, len(self.items))
        hits = np.bincount(self.item, self.weights * taken, len(self.items))
        self._mean = float(hits.sum() / offered.sum())
        rate = (hits + _PRIOR * self._mean) / (offered + _PRIOR)
        self.popular = np.log(hits + _PRIOR * self._mean)
        self.odds = _log_odds(rate)

    def places(self, rows: Rows) -> tuple[Array, Array]:
        """Return the indices of the users and items of new rows, or -1 for unknown ones."""
        known = zip((self.users, self.items), self._columns, strict=True)
        user, item = (_place(each, rows.columns[name]) for each, name in known)
        return user, item

    def item_odds(self, item: Array) -> Floats:
        """Return the log-odds that an item is taken if it is offered."""
        return np.where(item < 0, _log_odds(np.array(self._mean)), self.odds[item])


def popularity(task: Recommendation, rows: Rows, clock: Clock) -> Answer:
    """Return a function that scores items by how often all users took them."""
    clock.check()
    known = _Taken(task, rows)

    def answer(further: Rows, clock: Clock) -> Any:
        clock.check()
        _, item = known.places(further)
        popular = np.where(item < 0, -np.inf, known.popular[item])
        popular = np.maximum(popular, known.popular.min() - 1)
        vectors = [np.ones(len(item)), popular]
        return np.column_stack([known.item_odds(item), *vectors]).astype(np.float32)

    return answer


def item_item(task: Recommendation, rows: Rows, clock: Clock) -> Answer:
    """Return a function that scores items by their similarity to the items that the user took."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    clock.check()
    known = _Taken(task, rows)
    pairs = np.unique(np.stack([known.user, known.item])[:, known.taken], axis=1)
    size = len(known.users), len(known.items)
    factors = min(FACTORS, *(each - 1 for each in size))
    if factors < _FEWEST_FACTORS:
        raise NoBaselineError(
            f"item-item needs at least {_FEWEST_FACTORS + 1} users and {_FEWEST_FACTORS + 1} "
            f"items, but the training data has {size[0]} users and {size[1]} items"
        )
    took = sparse.csr_array((np.ones(pairs.shape[1]), tuple(pairs)), shape=size)
    cosines = took @ sparse.diags_array(1 / np.sqrt(took.sum(axis=0).clip(1)))
    _, values, right = sparse.linalg.svds(cosines, factors, random_state=0)
    clock.check()
    of_items = right.T * values
    of_users = took @ of_items

    def scores(user: Array, item: Array) -> Floats:
        found: Floats = (of_users[user] * of_items[item]).sum(axis=1)
        return found * ((user >= 0) & (item >= 0))

    # Exclude the similarity of an item to itself from its score if the user took the item.
    own = known.taken * (of_items[known.item] ** 2).sum(axis=1)
    found = np.stack([known.odds[known.item], scores(known.user, known.item) - own], axis=1)
    model = LogisticRegression().fit(found, known.taken, known.weights)

    def answer(further: Rows, clock: Clock) -> Any:
        clock.check()
        user, item = known.places(further)
        given = np.stack([known.item_odds(item), scores(user, item)], axis=1)
        vectors = (
            np.where(place[:, None] < 0, 0.0, each[place])
            for place, each in ((user, of_users), (item, of_items))
        )
        return np.column_stack([model.decision_function(given), *vectors]).astype(np.float32)

    return answer


def _place(known: Array, values: Array) -> Array:
    places = np.searchsorted(known, values).clip(max=len(known) - 1)
    return np.where(known[places] == values, places, -1)


def _log_odds(p: Floats) -> Floats:
    least = 1e-6
    inside = p.clip(least, 1 - least)
    odds: Floats = np.log(inside) - np.log1p(-inside)
    return odds
