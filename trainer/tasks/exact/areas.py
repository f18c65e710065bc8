"""The areas under the curves of a score: what parts two kinds of examples, whatever the threshold.

    auc                 how often a true example has the higher score of a pair with a false one;
                        of equal scores half of the pairs count (Mann and Whitney 1947)
    average_precision   the mean, over the true examples, of the precision at their score

Both are those of scikit-learn, from the scores themselves: neither their range nor the share of the
true examples matters. A score that is the same for all has 0.5 and the share of the true ones.

How sure they are of themselves comes from the influence of each example, the derivative by its
weight: of `auc` that is the variance of DeLong, DeLong and Clarke-Pearson (1988).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]


class Areas(NamedTuple):
    """Both areas; not a number where the examples are of one kind."""

    auc: float
    average_precision: float


class Influences(NamedTuple):
    """What a little more weight of an example adds to both areas: arrays of one shape."""

    auc: Doubles
    average_precision: Doubles


class Ranked(NamedTuple):
    """The distinct scores from the highest on, and what the examples of each weigh."""

    scores: Floats
    true: Doubles
    false: Doubles

    def of(self, place: Any, labels: Any, weights: Floats) -> Ranked:
        """Return the same scores with other labels of the examples, whose scores have a place."""
        yes, size = np.asarray(labels).astype(bool), len(self.scores)
        true, false = (
            np.bincount(place, weights * each, size).astype(np.float64) for each in (yes, ~yes)
        )
        return self._replace(true=true, false=false)

    def areas(self) -> Areas:
        """Return both areas."""
        hits, misses = np.cumsum(self.true), np.cumsum(self.false)
        if not len(hits) or not hits[-1] or not misses[-1]:
            return Areas(np.nan, np.nan)
        # Shares: the product of two sums of tiny weights would be none.
        true, false = self.true / hits[-1], self.false / misses[-1]
        above = hits / hits[-1] - true / 2
        # Products of long rows would wait for the threads of BLAS.
        precise = true * _shares(hits, hits + misses)
        return Areas(float((false * above).sum()), float(precise.sum()))

    def log_rank(self) -> float:
        """Return how high the true examples are, as the mean of -log(rank / all) (Savage 1956)."""
        both = self.true + self.false
        rank = np.cumsum(both) - both / 2
        return float(-(self.true * np.log(rank / both.sum())).sum() / self.true.sum())

    def influences(self) -> tuple[Influences, Influences]:
        """Return those of a true and of a false example of each score."""
        areas, hits, misses = self.areas(), np.cumsum(self.true), np.cumsum(self.false)
        all_true, all_false = hits[-1], misses[-1]
        above = (hits - self.true / 2) / all_true
        below = 1 - (misses - self.false / 2) / all_false
        both = hits + misses
        precision = _shares(hits, both)
        # An example counts in the precision at its own score and at each lower one.
        share = _shares(self.true / all_true, both)
        gain, loss = (_from_here_on(share * each) for each in (_shares(misses, both), precision))
        of_true = Influences(
            (below - areas.auc) / all_true,
            (precision - areas.average_precision) / all_true + gain,
        )
        return of_true, Influences((above - areas.auc) / all_false, -loss)


def areas(labels: Any, scores: Floats, weights: Floats | None = None) -> Areas:
    """Return both areas of examples [n]; what weighs nothing does not count."""
    return ranked(labels, scores, weights)[0].areas()


def influences(
    labels: Any, scores: Floats, weights: Floats | None = None
) -> tuple[Areas, Influences]:
    """Return both areas, and the influence [n] of each example; both kinds have to be there.

    With the weights w the sum of w times influence is 0, and the sum of its squares the variance of
    an area. Of two models on the same examples the variance of the difference is that of the
    differences of their influences.
    """
    found, place = ranked(labels, scores, weights)
    yes = np.asarray(labels).astype(bool)
    pairs = zip(*found.influences(), strict=True)
    return found.areas(), Influences(*(np.where(yes, a[place], b[place]) for a, b in pairs))


def ranked(
    labels: Any, scores: Floats, weights: Floats | None = None
) -> tuple[Ranked, npt.NDArray[np.intp]]:
    """Return the distinct scores with their weights, and the place [n] of each example's score."""
    order = np.argsort(-scores)
    ordered = scores[order]
    begins = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    place = np.empty_like(order)
    place[order] = np.cumsum(begins) - 1
    yes = np.asarray(labels).astype(bool)
    weight = np.ones(len(order)) if weights is None else np.asarray(weights, np.float64)
    count = int(begins.sum())
    both = (np.bincount(place, weight * kind, count) for kind in (yes, ~yes))
    true, false = (each.astype(np.float64) for each in both)
    return Ranked(ordered[begins], true, false), place


def _shares(part: Doubles, whole: Doubles) -> Doubles:
    # The highest scores may weigh nothing.
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0)


def _from_here_on(values: Doubles) -> Doubles:
    return np.cumsum(values[::-1])[::-1]
