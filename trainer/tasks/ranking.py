"""What is taken of what is shown: clicks, purchases, answers that were relevant.

    label     as of `binary_classification`; the positive class is "taken", and the second one where
              none is named: that something is taken is not told by how rare it is
    outputs   scores [n, 1]: logits of "taken"
    loss      binary cross entropy: each example by itself, so that scores are calibrated
    metrics   those of `binary_classification`; where `data.group` names what belongs to one query
              (a search, a page, a user), in an evaluation also ndcg, mrr and query_auc: means over
              the queries in which something was taken, of query_auc not everything
    answers   `logit` and `probability`

A query is a number or a text. Examples of equal scores count as ranked in the worst order, so that
a model that scores all alike ranks nothing (Jarvelin and Kekalainen 2002); the area counts them
half (Mann and Whitney 1947).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from trainer.tasks.base import Array, Direction, Examples, Floats, Target
from trainer.tasks.binary_classification import BinaryClassification
from trainer.tasks.metrics import NORMAL

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
        """Take a label, and the feature whose values name a query."""
        super().__init__(target)
        self._group = group

    @property
    def main_metric(self) -> str:
        """NDCG where queries are named."""
        return "ndcg" if self._group else super().main_metric

    @property
    def columns(self) -> tuple[str, ...]:
        """The feature that names a query."""
        return (self._group,) if self._group else ()

    @property
    def unit(self) -> str:
        """The query: its examples are ranked among each other."""
        return self._group

    def predicted(self, outputs: Any) -> None:
        """Return nothing: what is taken is ranked, and not decided."""

    def of_groups(self, metric: str, examples: Examples) -> Floats | None:
        """Return the values of each query, in the order of the groups."""
        if not self._group or metric not in BY_QUERY:
            return None
        return by_query(*self._scored(examples))[metric]

    def _scored(self, examples: Examples) -> Iterator[Array]:
        parts = [
            (part.columns[self._group], part.labels.astype(bool), part.outputs[:, 0])
            for part in examples.parts()
        ]
        return (np.concatenate(each) for each in zip(*parts, strict=True))

    def details(self, examples: Examples) -> dict[str, Any]:
        """Add the metrics by query; their groups, labels and scores are held in memory."""
        found = super().details(examples)
        if not self._group:
            return found
        groups, labels, scores = self._scored(examples)
        values = by_query(groups, labels, scores)
        of_all = len(np.unique(groups))
        return {
            **found,
            "metrics": {name: float(each.mean()) for name, each in values.items() if len(each)},
            "intervals": {name: interval(each) for name, each in values.items() if len(each)},
            "tables": [
                {
                    "title": f"Queries, by {self._group}",
                    "columns": ["Queries", "Number"],
                    "rows": [
                        ["all", of_all],
                        ["something was taken", len(values["ndcg"])],
                        ["something was taken and something not", len(values["query_auc"])],
                    ],
                }
            ],
        }


def by_query(groups: Array, labels: Array, scores: Array) -> dict[str, Floats]:
    """Return NDCG, the reciprocal rank of the first one taken, and the area, of each query [q]."""
    _, query = np.unique(groups, return_inverse=True)
    count = query.max(initial=-1) + 1
    taken = np.bincount(query, labels, count)
    left = np.bincount(query, ~labels, count)
    order = np.lexsort((labels, -scores.astype(np.float64), query))
    sorted_query, hit = query[order], labels[order]
    rank = _places(sorted_query)
    gained = np.bincount(sorted_query, hit / np.log2(rank + 2), count)
    # The best that a query of so many taken ones can gain.
    best = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(len(rank)) + 2))])
    first: Array = np.full(count, np.inf)
    np.minimum.at(first, sorted_query[hit], rank[hit])
    # The area by the ranks of what was taken, of which equal scores share the mean (Mann, Whitney).
    tie = np.cumsum((rank == 0) | (np.diff(scores[order], prepend=np.nan) != 0)) - 1
    shared = (np.bincount(tie, rank) / np.bincount(tie))[tie]
    behind = (taken + left)[sorted_query] - 1 - shared
    pairs = np.bincount(sorted_query, hit * behind, count) - taken * (taken - 1) / 2
    some, both = taken > 0, (taken > 0) & (left > 0)
    return {
        "ndcg": gained[some] / best[taken[some].astype(np.int64)],
        "mrr": 1 / (first[some] + 1),
        "query_auc": pairs[both] / (taken * left)[both],
    }


def _places(query: Array) -> Array:
    """Return how many of the same query are before each, of sorted queries."""
    begins = np.flatnonzero(np.diff(query, prepend=-1))
    lengths = np.diff(np.append(begins, len(query)))
    return np.arange(len(query)) - np.repeat(begins, lengths)


def interval(values: Floats) -> list[float]:
    """Return the 95 % interval of the mean over the queries, by the normal distribution."""
    mean, spread = values.mean(), NORMAL * values.std() / np.sqrt(len(values))
    return [float(np.clip(mean - spread, 0, 1)), float(np.clip(mean + spread, 0, 1))]
