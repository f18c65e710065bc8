"""Areas under curves, which measure how well scores separate true from false examples.

    auc                 the probability that a true example has a higher score than a false one;
                        ties count half (Mann and Whitney 1947)
    average_precision   the mean, over the true examples, of the precision at their score

Both agree with scikit-learn, and depend only on the order of the scores. A constant score has an
`auc` of 0.5, and an average precision equal to the fraction of true examples.

Standard errors are computed from the influence of each example: the derivative of the area with
respect to its weight. For `auc`, this is the variance of DeLong, DeLong and Clarke-Pearson (1988).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flotilla.trainer.tasks import intervals
from flotilla.trainer.tasks.intervals import Interval

# Number of distinct scores that `condense` keeps in all columns together, and the minimum number
# per column.
_FEW, _LEAST = 1 << 18, 1 << 10
Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


class Areas(NamedTuple):
    """The area under the ROC curve and the average precision, or NaN if all labels are equal.

    As `Influences`, the influences of the examples on each area, as two arrays of equal shape.
    """

    auc: Any
    average_precision: Any


Influences = Areas


class Ranked(NamedTuple):
    """The distinct scores in descending order, with sums over the examples that have each score.

    `true` and `false` sum weights, `true_squares` and `false_squares` sum squared weights.
    """

    scores: Floats
    true: Doubles
    false: Doubles
    true_squares: Doubles
    false_squares: Doubles

    @classmethod
    def merge(cls, parts: Sequence[Ranked]) -> Ranked:
        """Merge the distinct scores of several parts, and add the sums of equal scores."""
        scores, *sums = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.argsort(-scores)
        begins = np.flatnonzero(_differs(scores[order]))
        return cls(scores[order[begins]], *(np.add.reduceat(each[order], begins) for each in sums))

    def thin(self, most: int) -> Ranked:
        """Merge neighboring scores until about `most` intervals of equal weight remain.

        Scores in the same interval are treated as tied. If four million scores are reduced to a
        quarter of a million, `auc` decreases by 2e-6, and the average precision by 4e-5.
        """
        if len(self.scores) <= most:
            return self
        both = (np.cumsum(each) / max(each.sum(), 1e-300) for each in (self.true, self.false))
        place = np.floor(sum(both) * (most / 2))
        begins = np.flatnonzero(_differs(place))
        # Represent each interval by its middle score.
        middle = (begins + np.append(begins[1:], len(place))) // 2
        return Ranked(self.scores[middle], *(np.add.reduceat(each, begins) for each in self[1:]))

    @property
    def counts(self) -> tuple[float, float]:
        """The effective numbers of true and false examples."""
        sums = [float(each.sum()) for each in self[1:]]
        true, false = (
            float(intervals.kish(*pair)) for pair in zip(sums[:2], sums[2:], strict=True)
        )
        return true, false

    def areas(self) -> Areas:
        """Return both areas."""
        return self.influences()[0]

    def influences(self) -> tuple[Areas, Influences, Influences]:
        """Return both areas, and the influence of a true and of a false example at each score."""
        hits, misses = np.cumsum(self.true), np.cumsum(self.false)
        if not len(hits) or not hits[-1] or not misses[-1]:
            none = Influences(*np.zeros((2, len(hits))))
            return Areas(np.nan, np.nan), none, none
        # Use fractions, because the product of two tiny sums would underflow.
        true, false = self.true / hits[-1], self.false / misses[-1]
        above, below = hits / hits[-1] - true / 2, 1 - misses / misses[-1] + false / 2
        both = hits + misses
        precision = _shares(hits, both)
        areas = Areas(_product(false, above), _product(true, precision))
        # An example affects the precision at its own score and at all lower scores.
        share = _shares(true, both)
        loss = _reverse_cumsum(share * precision)
        gain = _reverse_cumsum(share) - loss
        of_true = Influences(
            (below - areas.auc) / hits[-1], (precision - areas.average_precision) / hits[-1] + gain
        )
        return areas, of_true, Influences((above - areas.auc) / misses[-1], -loss)

    def errors(self, of_true: Influences, of_false: Influences) -> Areas:
        """Return the standard errors of both areas, computed from the influences."""
        kinds = ((self.true_squares, of_true), (self.false_squares, of_false))
        pairs = [[_product(squares, each**2) for each in found] for squares, found in kinds]
        variances = (sum(pair) for pair in zip(*pairs, strict=True))
        return Areas(*(float(np.sqrt(each)) * self.correction for each in variances))

    def log_rank(self) -> float:
        """Return the mean of -log(rank / all) over the true examples (Savage 1956)."""
        both = self.true + self.false
        rank = np.cumsum(both) - both / 2
        return -_product(self.true, np.log(rank / both.sum())) / float(self.true.sum())

    @property
    def correction(self) -> float:
        """The small-sample factor for standard errors, based on the rarer kind of examples."""
        count = min(self.counts)
        return float(np.sqrt(count / (count - 1))) if count > 1 else 1.0


def areas(labels: Any, scores: Floats, weights: Floats | None = None) -> Areas:
    """Return the AUC and average precision of examples [n]. Examples of weight 0 are ignored."""
    return rank_scores(labels, scores, weights).areas()


def influences(
    labels: Any, scores: Floats, weights: Floats | None = None
) -> tuple[Areas, Influences]:
    """Return both areas, and the influence of each example on them [n].

    There must be true and false examples. The products of weight and influence sum to 0, and their
    squares sum to the variance of the area. To get the variance of the difference between two
    models on the same examples, use the differences of their influences.
    """
    order = np.argsort(-scores)
    found = rank_scores(labels, scores, weights, order)
    areas, *kinds = found.influences()
    place = _places(scores, order)
    return areas, Influences(*_expand(np.asarray(labels).astype(bool), place, *kinds))


def rank_scores(
    labels: Any, scores: Floats, weights: Floats | None = None, order: Places | None = None
) -> Ranked:
    """Return distinct scores and their sums. `order`, if given, sorts scores from high to low."""
    order = np.argsort(-scores) if order is None else order
    ordered, yes = scores[order], np.asarray(labels).astype(bool)[order]
    begins = np.flatnonzero(_differs(ordered))
    weight = np.ones(len(order)) if weights is None else np.float64(weights[order])
    kinds = (yes, ~yes)
    sums = [np.add.reduceat(weight * kind, begins) for kind in kinds if len(begins)]
    squares = sums
    if weights is not None:
        squares = [np.add.reduceat(weight**2 * kind, begins) for kind in kinds if len(begins)]
    return Ranked(ordered[begins], *(sums + squares or [np.zeros(0)] * 4))


def _places(scores: Floats, order: Places) -> Places:
    """For each example [n], return the index of its score among the distinct scores."""
    place = np.empty_like(order)
    place[order] = np.cumsum(_differs(scores[order])) - 1
    return place


def _expand(
    yes: npt.NDArray[np.bool_], place: Places, of_true: Influences, of_false: Influences
) -> list[Doubles]:
    # Concatenate both tables, so that one lookup is enough.
    row = place + len(of_true.auc) * ~yes
    return [np.concatenate(pair)[row] for pair in zip(of_true, of_false, strict=True)]


def _product(one: Doubles, other: Doubles) -> float:
    # NumPy's pairwise sum is accurate enough and, unlike a dot product, uses only this thread.
    return float((one * other).sum())


def _differs(ordered: Floats) -> npt.NDArray[np.bool_]:
    return np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]


def _shares(part: Doubles, whole: Doubles) -> Doubles:
    # Avoid a division by zero: if the highest scores have weight 0, so do their sums.
    return np.divide(part, whole, out=np.zeros_like(whole), where=whole > 0)


def _reverse_cumsum(values: Doubles) -> Doubles:
    return np.cumsum(values[::-1])[::-1]


class Scores:
    """Accumulates scores in columns with their labels, and computes the areas of each column.

    The areas are exact as long as the scores, labels and weights of all examples are in memory (13
    bytes per example for one float32 column). `condense` makes them approximate.
    """

    def __init__(self, columns: int = 1, scored: Callable[[Floats], Floats] | None = None) -> None:
        """Create an empty accumulator. `scored` converts the stored values to scores."""
        self._columns, self._scored = columns, scored
        self._held: list[tuple[Any, Floats, Floats]] = []
        self._ranked: list[Ranked] = []

    def add(self, labels: Any, scores: Floats, weights: Floats) -> None:
        """Add examples: scores [n, columns], weights [n], and bool labels [n, columns].

        Labels may also be integers [n]: the index of each example's true column.
        """
        self._held.append((labels, scores, weights))

    def condense(self) -> None:
        """If there are many examples, replace them with a smaller number of merged scores."""
        most = max(_FEW // self._columns, _LEAST)
        if sum(len(scores) for _, scores, _ in self._held) > 4 * most:
            labels, scores, weights = self._all_held()
            found = [
                self._column(
                    at, labels[:, at] if labels.ndim > 1 else labels == at, scores, weights
                )
                for at in range(self._columns)
            ]
            self._ranked, self._held = [each.thin(most) for each in found], []

    def result(self) -> ColumnAreas:
        """Return the areas of all columns."""
        labels, scores, weights = self._all_held()
        found, together = [], np.zeros((2, len(weights)))
        for at in range(self._columns):
            yes, order = self._yes(at, labels, weights), None
            if self._columns > 1 and not self._ranked and len(yes):
                order = np.argsort(-scores[:, at])
            column = self._column(at, yes, scores, weights, order)
            values, *kinds = column.influences()
            errors = column.errors(*kinds)
            if order is not None:
                own = _expand(yes, _places(scores[:, at], order), *kinds)
                together += weights * np.stack(own) * column.correction
            share = column.true.sum() / max(column.true.sum() + column.false.sum(), 1e-300)
            found.append((*values, *errors, min(column.counts), share))
        columns = np.array(found)
        defined = columns[~np.isnan(columns[:, 0])]
        squares = (defined[:, 2:4] ** 2).sum(axis=0)
        # After `condense`, the influences of examples are unknown. Assume fully dependent columns.
        whole = defined[:, 2:4].sum(axis=0) ** 2
        if self._columns > 1 and not self._ranked:
            whole = (together**2).sum(axis=1)
        return ColumnAreas(columns, np.divide(whole, squares, out=np.ones(2), where=squares > 0))

    def _all_held(self) -> tuple[Any, Floats, Floats]:
        if len(self._held) != 1:
            empty = np.zeros((0, self._columns))
            parts = self._held or [(empty.astype(bool), empty, empty[:, 0])]
            labels, scores, weights = (np.concatenate(e) for e in zip(*parts, strict=True))
            self._held = [(labels, scores, weights)]
        labels, scores, weights = self._held[0]
        return labels, self._scored(scores) if self._scored and len(scores) else scores, weights

    def _yes(self, at: int, labels: Any, weights: Floats) -> npt.NDArray[np.bool_]:
        """Return a mask of the true examples. It is empty if the column has no area."""
        yes: npt.NDArray[np.bool_]
        yes = labels == at if labels.ndim == 1 else labels[:, at].astype(bool)
        both = self._ranked or (weights[yes].any() and weights[~yes].any())
        return yes if both else yes[:0]

    def _column(
        self,
        at: int,
        yes: npt.NDArray[np.bool_],
        scores: Floats,
        weights: Floats,
        order: Places | None = None,
    ) -> Ranked:
        found = rank_scores(yes, scores[: len(yes), at], weights[: len(yes)], order)
        known = self._ranked[at : at + 1]
        return Ranked.merge([*known, found]) if known else found


class ColumnAreas(NamedTuple):
    """The areas of all columns.

    `columns` has a row per column: both areas, both standard errors, the effective number of
    examples of the rarer kind, and the fraction of true examples. `inflation` is, for each area,
    the variance of the mean over the columns, divided by its variance for independent columns.
    """

    columns: Doubles
    inflation: Doubles

    @property
    def each(self) -> list[dict[str, float | None]]:
        """The areas of each column. They are None if all labels in the column are equal."""
        return [
            {name: None if np.isnan(value) else float(value) for name, value in pairs}
            for pairs in (zip(Areas._fields, row, strict=False) for row in self.columns)
        ]

    def metrics(self, prefix: str = "") -> dict[str, float | None]:
        """Return the means over the columns that have areas."""
        values = self._defined[:, :2]
        means = values.mean(axis=0).tolist() if len(values) else [None, None]
        return {f"{prefix}{name}": mean for name, mean in zip(Areas._fields, means, strict=True)}

    def intervals(self, prefix: str = "") -> dict[str, Interval]:
        """Return the intervals of the means."""
        found, columns = {}, self._defined
        for at, name in enumerate(Areas._fields if len(columns) else ()):
            # Unseen examples are assumed to be ranked at random: then the AUC is 1/2, and the
            # average precision is the fraction of true examples.
            ends = [
                intervals.metric_interval(
                    row[at], row[2 + at], row[4], unseen=(row[5] if at else 1 / 2,)
                )
                for row in columns
            ]
            each = np.array(ends).T
            found[prefix + name] = intervals.mean_interval(
                columns[:, at], (each[0], each[1]), self.inflation[at]
            )
        return found

    @property
    def _defined(self) -> Doubles:
        return self.columns[~np.isnan(self.columns[:, 0])]
