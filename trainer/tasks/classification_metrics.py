"""The metrics of a classifier, from labels [n] and its predictions; scikit-learn does the sums.

A metric that is not defined, such as the area under the ROC of a class that does not occur, is
None. Curves are thinned to what a picture can show; the areas are those of the whole curves.

How sure a metric is: percentile bootstrap over the examples (Efron 1979).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TOP = 3
BINARY = 2
BINS = 15
CURVE_POINTS = 100

Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.int64]
Metrics = dict[str, float | None]


def _scores() -> Any:
    # It loads pandas and takes half a second, which training has no use for.
    from sklearn import metrics  # noqa: PLC0415

    return metrics


def losses(labels: Labels, logits: Floats) -> Floats:
    """Return the cross entropy [n] of logits [n, classes], in nats."""
    result: Floats = -_log_softmax(logits)[np.arange(len(labels)), labels]
    return result


def softmax(logits: Floats) -> Floats:
    """Return the probabilities of logits [n, classes]."""
    return np.exp(_log_softmax(logits)).astype(np.float32)


def in_top(labels: Labels, logits: Floats) -> npt.NDArray[np.bool_]:
    """Say of each example whether its class is among the `TOP` that are taken to be likeliest."""
    own = logits[np.arange(len(labels)), labels][:, np.newaxis]
    # Of equal logits the higher class goes first, as in scikit-learn.
    later = np.arange(logits.shape[1]) > labels[:, np.newaxis]
    ahead = (logits > own) | ((logits == own) & later)
    result: npt.NDArray[np.bool_] = ahead.sum(axis=1) < TOP
    return result


Area = dict[str, float | None]


def exact_areas(labels: Labels, logits: Floats, weights: Floats | None = None) -> list[Area]:
    """Return `auc` and `pr_auc` of each class against all others; None of an absent one.

    Examples have `weights` [n], or count the same.
    """
    probabilities = softmax(logits)
    count = range(logits.shape[1])
    return [_areas(labels == each, probabilities[:, each], weights) for each in count]


class Areas:
    """The areas of each class from counts of both kinds of examples at each step of its log-odds.

    Examples at one step count as tied, which is what an area may be off by: half of their share.
    """

    def __init__(self, classes: int) -> None:
        """Count nothing yet."""
        self._steps = int(np.clip(_MOST_STEPS // classes, 64, 4096))
        self._own, self._others = np.zeros((2, classes, self._steps))

    def add(self, labels: Labels, logits: Floats, weights: Floats) -> None:
        """Add some examples."""
        sure = _log_softmax(logits)
        with np.errstate(divide="ignore"):
            odds = sure - np.log(-np.expm1(sure))
        share = np.clip(odds / (2 * _LARGEST_LOGIT) + 0.5, 0, 1)
        step = np.minimum((share * self._steps).astype(np.int64), self._steps - 1)
        for index in range(len(self._own)):
            mine = labels == index
            for counts, rows in ((self._own, mine), (self._others, ~mine)):
                counts[index] += np.bincount(step[rows, index], weights[rows], self._steps)

    def result(self) -> list[Area]:
        """Return the areas of each class; None of an absent one."""
        return [self._of(own, others) for own, others in zip(self._own, self._others, strict=True)]

    @staticmethod
    def _of(own: Floats, others: Floats) -> Area:
        if not own.sum() or not others.sum():
            return {"auc": None, "pr_auc": None}
        hits, misses = own[::-1].cumsum()[::-1], others[::-1].cumsum()[::-1]
        above = (others * (hits - own / 2)).sum()
        precise = (own * hits / np.maximum(hits + misses, _TINY)).sum()
        return {"auc": float(above / (hits[0] * misses[0])), "pr_auc": float(precise / hits[0])}


def per_class(
    counts: tuple[Counts, Counts, Counts], areas: Sequence[Area], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Return precision, recall, F1, support and areas of each class; zeros where it is absent.

    `counts` are how often each class was predicted rightly, is the label, and was predicted.
    """
    hits, support, predicted = counts
    return [
        {
            "label": name,
            "precision": float(hits[at] / max(predicted[at], _TINY)),
            "recall": float(hits[at] / max(support[at], _TINY)),
            "f1": float(2 * hits[at] / max(support[at] + predicted[at], _TINY)),
            "support": plain(support[at]),
            **areas[at],
        }
        for at, name in enumerate(names)
    ]


def plain(count: float) -> float | int:
    """Return a count as a whole number, unless examples have weights."""
    return int(count) if float(count).is_integer() else float(count)


def mean_area(rows: list[dict[str, Any]], area: str) -> float | None:
    """Return the mean area over the classes that have one."""
    found = [row[area] for row in rows if row[area] is not None]
    return float(np.mean(found)) if found else None


def curves(labels: Labels, logits: Floats, names: list[str]) -> list[dict[str, Any]]:
    """Return ROC (false, true positive rate) and precision over recall of each class that can."""
    found, probabilities = [], softmax(logits)
    for index, name in enumerate(names):
        own, score = labels == index, probabilities[:, index]
        if not 0 < own.sum() < len(own):
            continue
        false, true, _ = _scores().roc_curve(own, score)
        precision, recall, _ = _scores().precision_recall_curve(own, score)
        found.append(
            {"label": name, "roc": _thinned(false, true), "pr": _thinned(recall, precision)}
        )
    return found


def roc(labels: Labels, logits: Floats) -> list[list[float]]:
    """Return one ROC curve: points of false positive rate, true positive rate and threshold.

    Of two classes it is that of the second one. Of more it is micro-averaged: every class of every
    example is one question, whether it is that class, and all of them make one curve. Empty where
    there is nothing to distinguish.
    """
    probabilities, classes = softmax(logits), logits.shape[1]
    if classes <= BINARY:
        own, score = labels == classes - 1, probabilities[:, -1]
    else:
        own = (labels[:, np.newaxis] == np.arange(classes)).ravel()
        score = probabilities.ravel()
    if not 0 < own.sum() < len(own):
        return []
    false, true, thresholds = _scores().roc_curve(own, score)
    kept = _kept(false, true)
    # The first threshold is above every score: it is infinite, which JSON cannot say.
    found = zip(false[kept], true[kept], thresholds[kept].clip(0, 1), strict=True)
    return [[round(float(value), 5) for value in point] for point in found]


def calibration(labels: Labels, logits: Floats) -> dict[str, Any]:
    """Return the calibration of some examples of equal weight."""
    found = Calibration()
    found.add(labels, logits, np.ones(len(labels)))
    return found.result()


class Calibration:
    """The expected calibration error of the likeliest class, and its reliability curve.

    The error is the mean of |accuracy - confidence| over `BINS` bins of equal width, weighted by
    their examples (Guo et al. 2017).
    """

    def __init__(self) -> None:
        """Begin without examples."""
        self._weight, self._sure, self._right = np.zeros((3, BINS))

    def add(self, labels: Labels, logits: Floats, weights: Floats) -> None:
        """Add some examples."""
        confidence = np.clip(np.exp(_log_softmax(logits)).max(axis=1), 0, 1)
        place = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], confidence)
        right = weights * (logits.argmax(axis=1) == labels)
        self._weight += np.bincount(place, weights, BINS)
        self._sure += np.bincount(place, weights * confidence, BINS)
        self._right += np.bincount(place, right, BINS)

    def result(self) -> dict[str, Any]:
        """Return the `error`, and `bins` with `confidence`, `accuracy` and `examples`."""
        kept = self._weight > 0
        weight, sure, right = (each[kept] for each in (self._weight, self._sure, self._right))
        bins = [
            {"confidence": float(s / w), "accuracy": float(r / w), "examples": plain(w)}
            for w, s, r in zip(weight, sure, right, strict=True)
        ]
        return {"error": float(np.abs(right - sure).sum() / weight.sum()), "bins": bins}


def _areas(own: npt.NDArray[np.bool_], score: Floats, weights: Floats | None) -> Area:
    each = np.ones(len(own)) if weights is None else weights
    if not each[own].sum() or not each[~own].sum():
        return {"auc": None, "pr_auc": None}
    return {
        "auc": float(_scores().roc_auc_score(own, score, sample_weight=weights)),
        "pr_auc": float(_scores().average_precision_score(own, score, sample_weight=weights)),
    }


def _thinned(x: Floats, y: Floats) -> list[list[float]]:
    kept = _kept(x, y)
    return [[round(float(a), 5), round(float(b), 5)] for a, b in zip(x[kept], y[kept], strict=True)]


def _kept(x: Floats, y: Floats) -> npt.NDArray[np.int64]:
    """Keep all of few points, else those at equal steps along the curve, both ends among them."""
    if len(x) <= CURVE_POINTS:
        return np.arange(len(x))
    way = np.concatenate([[0.0], np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))])
    wanted = np.linspace(0, way[-1], CURVE_POINTS)
    return np.unique(np.searchsorted(way, wanted).clip(0, len(x) - 1))


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


RESAMPLES = 1000
CONFIDENCE = 0.95
# Of a normal distribution, half of what is outside on each side.
NORMAL = 1.959963984540054
_TINY = 1e-12
# Of log-odds: beyond it a probability is 0 or 1 in single precision.
_LARGEST_LOGIT = 20.0
# Of all classes together: some megabytes.
_MOST_STEPS = 1 << 20
# Metrics that are means over the examples.
MEANS = ("loss", "accuracy", "top_3_accuracy")
AVERAGES = tuple(
    f"{average}_{name}"
    for average in ("macro", "weighted")
    for name in ("precision", "recall", "f1")
)
# Numbers that are drawn at once: a few megabytes.
_MOST_DRAWN = 1_000_000
# The same predictions give the same intervals.
_SEED = 0

Interval = list[float]
Counts = npt.NDArray[Any]


class Means:
    """The metrics that are means over the examples, with their intervals."""

    def __init__(self) -> None:
        """Begin without examples."""
        self._weight = self._squares = self._loss = self._loss_squares = 0.0
        self._hits = self._top = 0.0

    def add(self, labels: Labels, logits: Floats, weights: Floats) -> None:
        """Add some examples."""
        loss = losses(labels, logits)
        self._weight += weights.sum()
        self._squares += (weights**2).sum()
        self._loss += (weights * loss).sum()
        self._loss_squares += (weights * loss**2).sum()
        self._hits += weights[logits.argmax(axis=1) == labels].sum()
        self._top += weights[in_top(labels, logits)].sum()

    @property
    def examples(self) -> float:
        """How many examples of equal weight would be as much (Kish 1965, section 11.7)."""
        return float(self._weight**2 / max(self._squares, _TINY))

    def metrics(self) -> dict[str, float]:
        """Return the metrics that a loss and an accuracy do not say already."""
        return {"top_3_accuracy": float(self._top / max(self._weight, _TINY))}

    def intervals(self) -> dict[str, Interval]:
        """Return the 95 % intervals of `MEANS`: of a normal mean, and Wilson's of shares."""
        weight, examples = max(self._weight, _TINY), self.examples
        mean = self._loss / weight
        variance = max(self._loss_squares / weight - mean**2, 0.0)
        margin = NORMAL * math.sqrt(variance / max(examples - 1, 1))
        return {
            "loss": [float(mean - margin), float(mean + margin)],
            "accuracy": wilson(self._hits / weight, examples),
            "top_3_accuracy": wilson(self._top / weight, examples),
        }


def wilson(share: float, examples: float) -> Interval:
    """Return the 95 % score interval of a share (Wilson 1927, J. Am. Stat. Assoc. 22).

    Unlike a bootstrap it has a width where all examples are right.
    """
    squared = NORMAL**2
    middle = (share + squared / (2 * examples)) / (1 + squared / examples)
    spread = math.sqrt(max(share * (1 - share), 0) / examples + squared / (4 * examples**2))
    margin = NORMAL * spread / (1 + squared / examples)
    return [float(max(middle - margin, 0.0)), float(min(middle + margin, 1.0))]


def intervals_of_averages(cells: Counts, examples: float) -> dict[str, Interval]:
    """Return the 95 % intervals of `AVERAGES` from the confusion matrix, by a bootstrap."""
    classes = len(cells)
    # Who draws examples draws cells of the confusion matrix; there are far fewer of them.
    true, guess = np.nonzero(cells)
    shares = cells[true, guess] / cells.sum()
    generator, drawn = np.random.default_rng(_SEED), []
    for some in _parts(len(true)):
        for each in generator.multinomial(round(examples), shares, some):
            hits = np.where(true == guess, each, 0)
            sums = ((true, hits), (true, each), (guess, each))
            counts = (np.bincount(own, weights, classes) for own, weights in sums)
            drawn.append([*averages(*counts).values()])
    return _percentiles(AVERAGES, drawn)


def averages(hits: Counts, support: Counts, predicted: Counts) -> dict[str, float]:
    """Return macro and weighted precision, recall and F1 from the counts of each class.

    They are how often it was predicted rightly, is the label (`support`), and was predicted; of
    examples with weights these are sums, which may be far below 1. Fast enough for a thousand
    resamples of a thousand classes.
    """
    occurs = (support + predicted) > 0
    each = (
        hits / np.maximum(predicted, _TINY),
        hits / np.maximum(support, _TINY),
        2 * hits / np.maximum(support + predicted, _TINY),
    )
    found = [float(values[occurs].mean()) for values in each]
    found += [float(np.average(values, weights=support)) for values in each]
    return dict(zip(AVERAGES, found, strict=True))


def _parts(width: int) -> Iterator[int]:
    """Yield how many resamples to draw at once: few of many examples."""
    most = max(_MOST_DRAWN // width, 1)
    for begin in range(0, RESAMPLES, most):
        yield min(most, RESAMPLES - begin)


def _percentiles(names: tuple[str, ...], drawn: Any) -> dict[str, Interval]:
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [outside, 100 - outside], axis=0)
    return {name: [float(low[at]), float(high[at])] for at, name in enumerate(names)}
