"""Ranking of offered items by whether they are taken: clicks, purchases, relevant answers.

    label     as in `binary_classification`; the positive class is "taken", by default the second
              one, since rarity does not identify it
    outputs   scores [n, 1]: logits of "taken"
    loss      binary cross entropy: each example by itself, so that scores are calibrated
    metrics   those of `binary_classification`; if `data.group` identifies queries (a search, a
              page, a user), an evaluation adds ndcg, mrr and query_auc: means over the queries
              with a taken item, for query_auc also with one that was not taken
    answers   `logit` and `probability`

A query is a number or a text, and has the mean weight of its examples. For tied scores the metrics
are the expectation over their orders (McSherry and Najork 2008), so that a model with constant
scores equals a random order.
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
from flotilla.trainer.tasks.binary_classification import BinaryClassification
from flotilla.trainer.tasks.exact.intervals import Interval, metric_interval
from flotilla.trainer.tasks.exact.sums import Moments

BY_QUERY = ("ndcg", "mrr", "query_auc")


class Ranking(BinaryClassification):
    """See the module."""

    name = "ranking"
    positive_by = "order"
    directions: ClassVar[Mapping[str, Direction]] = {
        **BinaryClassification.directions,
        **dict.fromkeys(BY_QUERY, "higher"),
    }

    def __init__(self, target: Target, *, group: str = "") -> None:
        """Accept a label, and the feature that identifies a query."""
        super().__init__(target)
        self._group = group

    @property
    def main_metric(self) -> str:
        """NDCG if queries are identified."""
        return "ndcg" if self._group else super().main_metric

    @property
    def columns(self) -> tuple[str, ...]:
        """The feature that identifies a query."""
        return (self._group,) if self._group else ()

    @property
    def unit(self) -> str:
        """The query: its examples are ranked together."""
        return self._group

    def predicted(self, outputs: Any) -> None:
        """Return None: a ranking makes no decision."""

    def group_values(self, metric: str, examples: Examples) -> Floats | None:
        """Return the values of each query, in the order of the groups."""
        if not self._group or metric not in BY_QUERY:
            return None
        tally = QueryTally(self._group, Tally())
        for part in examples.parts():
            tally.add(part)
        return tally.values()[metric].values

    def tally(self) -> Tally:
        """Return an accumulator of examples and, if queries are identified, of queries."""
        return QueryTally(self._group, super().tally()) if self._group else super().tally()


class Queries(NamedTuple):
    """The values of a metric for each query that defines it, and their weights."""

    values: Floats
    weights: Floats

    @property
    def mean(self) -> float | None:
        """The mean over the queries, None if there are none."""
        return float(np.average(self.values, weights=self.weights)) if len(self.values) else None

    @property
    def interval(self) -> Interval:
        """Its 95 % interval."""
        moments = Moments()
        moments.add(self.values[np.newaxis], self.weights)
        (mean,), (error,) = moments.result()
        return metric_interval(mean, error, moments.count)


class QueryTally(Tally):
    """The metrics by example and by query; groups, labels and scores stay in memory."""

    def __init__(self, group: str, examples: Tally) -> None:
        """Start without examples; `group` names the feature of queries."""
        self._group, self._examples = group, examples
        self._held: list[tuple[Array, ...]] = []

    def add(self, part: Part) -> None:
        """Add some examples."""
        self._examples.add(part)
        # A view would keep the whole part in memory.
        scores, labels = part.outputs[:, 0].copy(), part.labels.astype(bool).ravel()
        self._held.append((part.columns[self._group], labels, scores, example_weights(part)))

    def condense(self) -> None:
        """Reduce the memory for the metrics of examples."""
        self._examples.condense()

    def values(self) -> dict[str, Queries]:
        """Return the metrics by query."""
        if len(self._held) > 1:
            self._held = [tuple(np.concatenate(each) for each in zip(*self._held, strict=True))]
        return measure_queries(*self._held[0])

    def result(self) -> dict[str, Any]:
        """Return the metrics of examples and of queries."""
        found, values = self._examples.result(), self.values()
        found["metrics"] |= {name: each.mean for name, each in values.items()}
        some = {name: each for name, each in values.items() if len(each.values)}
        found["intervals"] |= {name: each.interval for name, each in some.items()}
        rows = [
            ["all", len(np.unique(self._held[0][0]))],
            ["something was taken", len(values["ndcg"].values)],
            ["something was taken and something not", len(values["query_auc"].values)],
        ]
        title = f"Queries, by {self._group}"
        return {
            **found,
            "tables": [{"title": title, "columns": ["Queries", "Number"], "rows": rows}],
        }


def measure_queries(
    groups: Array, labels: Array, scores: Array, weights: Floats | None = None
) -> dict[str, Queries]:
    """Return NDCG, reciprocal rank of the first taken item, and area under the ROC, by query.

    Examples of weight 0 are not ranked.
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
    # The ideal gain of a query with this number of taken items.
    best = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(len(order)) + 2))])
    gained = np.bincount(ties.query, ties.hits / ties.sizes * ties.discounts, count)
    # The area from the ranks of taken items; equal scores share their mean rank.
    behind = every[ties.query] - 1 - (ties.ranks + (ties.sizes - 1) / 2)
    pairs = np.bincount(ties.query, ties.hits * behind, count) - taken * (taken - 1) / 2
    weigh = heavy / np.maximum(every, 1)
    return {
        "ndcg": Queries(gained[some] / best[taken[some].astype(np.int64)], weigh[some]),
        "mrr": Queries(_first(ties), weigh[some]),
        "query_auc": Queries(pairs[both] / (taken * (every - taken))[both], weigh[both]),
    }


class _Ties(NamedTuple):
    """Groups of equal scores of a query; `ranks` counts the examples before, by query and score."""

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
    # The probability of each position of the first of `hits` items among `sizes` in random order.
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
