"""Ranking of offered items by the probability that a user takes (clicks or buys) them.

    label     as in `binary_classification`, with "taken" as the positive class: by default the
              second class, even if the first class is rarer
    outputs   scores [n, 1]: logits of "taken"
    loss      binary cross entropy of single examples, so that scores are calibrated
    metrics   as in `binary_classification`. If `data.group` identifies queries (a search, a page,
              a user), an evaluation adds ndcg, mrr and query_auc: averages over the queries with
              a taken item and, for query_auc, an item that was not taken
    answers   `logit` and `probability`

A query is identified by a number or a string. The weight of a query is the mean weight of its
examples. If scores are tied, a metric is the expected value over all orders of the tied items
(McSherry and Najork 2008), so constant scores are as good as a random order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from scipy import special

from flotilla.trainer.tasks.base import (
    Array,
    Direction,
    Examples,
    Floats,
    Part,
    Tally,
    Target,
    example_weights,
)
from flotilla.trainer.tasks.classification import BinaryClassification
from flotilla.trainer.tasks.intervals import Interval, Moments, metric_interval

BY_QUERY = ("ndcg", "mrr", "query_auc")


class Ranking(BinaryClassification):
    """A binary task whose scores rank items. See the module docstring."""

    name = "ranking"
    positive_by = "order"
    directions: ClassVar[Mapping[str, Direction]] = {
        **BinaryClassification.directions,
        **dict.fromkeys(BY_QUERY, "higher"),
    }

    def __init__(self, target: Target, *, group: str = "") -> None:
        """Require a binary target. `group` is the feature that identifies queries."""
        super().__init__(target)
        self._group = group

    @property
    def main_metric(self) -> str:
        """`ndcg` if queries are identified, else as in binary classification."""
        return "ndcg" if self._group else super().main_metric

    @property
    def columns(self) -> tuple[str, ...]:
        """The feature that identifies queries, if any."""
        return (self._group,) if self._group else ()

    @property
    def unit(self) -> str:
        """The feature that identifies queries. The items of a query are ranked together."""
        return self._group

    def predicted(self, outputs: Any) -> None:
        """Return None, because a ranking predicts no class."""

    def group_values(self, metric: str, examples: Examples) -> Floats | None:
        """Return the metric of each query for which it is defined, sorted by query id."""
        if not self._group or metric not in BY_QUERY:
            return None
        tally = QueryTally(self._group, Tally())
        for part in examples.parts():
            tally.add(part)
        return tally.values()[metric].values

    def tally(self) -> Tally:
        """Return an accumulator for metrics of examples and, if `group` is set, of queries."""
        return QueryTally(self._group, super().tally()) if self._group else super().tally()


class Queries(NamedTuple):
    """The values of a metric for the queries that have one, and the weights of these queries."""

    values: Floats
    weights: Floats

    @property
    def mean(self) -> float | None:
        """The weighted mean over the queries, or None if there are no queries."""
        return float(np.average(self.values, weights=self.weights)) if len(self.values) else None

    @property
    def interval(self) -> Interval:
        """The 95% confidence interval of the mean."""
        moments = Moments()
        moments.add(self.values[np.newaxis], self.weights)
        (mean,), (error,) = moments.result()
        return metric_interval(mean, error, moments.count)


class QueryTally(Tally):
    """Accumulates metrics of examples and queries, and keeps ids, labels and scores in memory."""

    def __init__(self, group: str, examples: Tally) -> None:
        """Create an empty accumulator. `group` is the feature that identifies queries."""
        self._group, self._examples, self.inner = group, examples, (examples,)
        self._held: list[tuple[Array, ...]] = []

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        self._examples.add(part)
        # Copy the scores, because a view would keep the whole part in memory.
        scores, labels = part.outputs[:, 0].copy(), part.labels.astype(bool).ravel()
        self._held.append((part.columns[self._group], labels, scores, example_weights(part)))

    def values(self) -> dict[str, Queries]:
        """Return the metrics of each query."""
        if len(self._held) > 1:
            self._held = [tuple(np.concatenate(each) for each in zip(*self._held, strict=True))]
        return measure_queries(*self._held[0])

    def result(self) -> dict[str, Any]:
        """Return the metrics of examples and of queries, and the number of queries."""
        found, values = self._examples.result(), self.values()
        found["metrics"] |= {name: each.mean for name, each in values.items()}
        some = {name: each for name, each in values.items() if len(each.values)}
        found["intervals"] |= {name: each.interval for name, each in some.items()}
        rows = [
            ["all", len(np.unique(self._held[0][0]))],
            ["with a taken item", len(values["ndcg"].values)],
            ["with taken and other items", len(values["query_auc"].values)],
        ]
        title = f"Queries, by {self._group}"
        return {
            **found,
            "tables": [{"title": title, "columns": ["Queries", "Number"], "rows": rows}],
        }


def measure_queries(
    groups: Array, labels: Array, scores: Array, weights: Floats | None = None
) -> dict[str, Queries]:
    """Compute `ndcg`, `mrr` (reciprocal rank of the first taken item) and `query_auc` per query.

    Examples of weight 0 are ignored.
    """
    if weights is not None and not weights.all():
        groups, labels, scores, weights = (
            each[weights > 0] for each in (groups, labels, scores, weights)
        )
    _, query = np.unique(groups, return_inverse=True)
    count = query.max(initial=-1) + 1
    taken, every = np.bincount(query, labels, count), np.bincount(query, minlength=count)
    heavy = every if weights is None else np.bincount(query, weights, count)
    order = np.lexsort((-scores.astype(np.float64), query))
    ties = _ties(query[order], labels[order], scores[order])
    some, both = taken > 0, (taken > 0) & (taken < every)
    # The highest possible gain of a query, by its number of taken items.
    best = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(len(order)) + 2))])
    gained = np.bincount(ties.query, ties.hits / ties.sizes * ties.discounts, count)
    # Compute the area from the ranks of taken items. Tied items have the same mean rank.
    behind = every[ties.query] - 1 - (ties.ranks + (ties.sizes - 1) / 2)
    pairs = np.bincount(ties.query, ties.hits * behind, count) - taken * (taken - 1) / 2
    weigh = heavy / np.maximum(every, 1)
    return {
        "ndcg": Queries(gained[some] / best[taken[some].astype(np.int64)], weigh[some]),
        "mrr": Queries(_first(ties), weigh[some]),
        "query_auc": Queries(pairs[both] / (taken * (every - taken))[both], weigh[both]),
    }


class _Ties(NamedTuple):
    """Groups of equal scores within a query. `ranks` counts the items ranked above each group."""

    query: Array
    ranks: Array
    sizes: Array
    hits: Floats
    discounts: Floats


def _ties(query: Array, labels: Array, scores: Array) -> _Ties:
    first = np.diff(query, prepend=-1) != 0
    begins = np.flatnonzero(first | (np.diff(scores, prepend=np.nan) != 0))
    places = np.arange(len(query))
    ranks = places - np.maximum.accumulate(np.where(first, places, 0))
    sums = (
        np.add.reduceat(each, begins) for each in (labels.astype(float), 1 / np.log2(ranks + 2))
    )
    sizes = np.diff(np.append(begins, len(query)))
    return _Ties(query[begins], ranks[begins], sizes, *sums)


def _first(ties: _Ties) -> Floats:
    """Return the expected reciprocal rank of the first taken item, for queries that have one."""
    found = np.flatnonzero(ties.hits > 0)
    _, at = np.unique(ties.query[found], return_index=True)
    own = found[at]
    sizes, hits, ranks = ties.sizes[own], ties.hits[own], ties.ranks[own]
    # If `sizes` tied items, of which `hits` were taken, are in random order, the first taken item
    # may be at several positions. Compute the probability of each position.
    tie = np.repeat(np.arange(len(own)), sizes)
    places = np.arange(len(tie)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    left, others = sizes[tie] - 1 - places, hits[tie] - 1
    possible = left >= others
    tie, places, left, others = (each[possible] for each in (tie, places, left, others))
    orders = _log_ways(left, others) - _log_ways(sizes, hits)[tie]
    each = np.exp(orders) / (ranks[tie] + places + 1)
    return np.bincount(tie, each, len(own)).astype(np.float64)


def _log_ways(of: Array, some: Array) -> Floats:
    result: Floats = (
        special.gammaln(of + 1.0) - special.gammaln(some + 1.0) - special.gammaln(of - some + 1.0)
    )
    return result
