"""The metrics of a classifier, from labels [n] and its predictions; scikit-learn does the sums.

A metric that is not defined, such as the area under the ROC of a class that does not occur, is
None. Curves are thinned to what a picture can show; the areas are those of the whole curves.

How sure a metric is: percentile bootstrap over the examples (Efron 1979).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn import metrics as scores
from sklearn.calibration import calibration_curve

TOP = 3
BINARY = 2
BINS = 15
CURVE_POINTS = 100

Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.int64]
Metrics = dict[str, float | None]


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


def headline(labels: Labels, logits: Floats) -> Metrics:
    """Return loss, accuracies, and macro and weighted averages of precision, recall and F1.

    Averages are over the classes that occur, as label or as prediction.
    """
    predicted = logits.argmax(axis=1)
    metrics: Metrics = {
        "loss": float(losses(labels, logits).mean()),
        "accuracy": float(scores.accuracy_score(labels, predicted)),
        "top_3_accuracy": float(in_top(labels, logits).mean()),
    }
    for average in ("macro", "weighted"):
        found = scores.precision_recall_fscore_support(
            labels, predicted, average=average, zero_division=0
        )
        for name, value in zip(("precision", "recall", "f1"), found, strict=False):
            metrics[f"{average}_{name}"] = float(value)
    return metrics


def per_class(labels: Labels, logits: Floats, names: list[str]) -> list[dict[str, Any]]:
    """Return precision, recall, F1, support and areas of each class; zeros where it is absent."""
    predicted, probabilities = logits.argmax(axis=1), softmax(logits)
    classes = list(range(len(names)))
    each = scores.precision_recall_fscore_support(
        labels, predicted, labels=classes, zero_division=0
    )
    return [
        {
            "label": name,
            "precision": float(precision),
            "recall": float(recall),
            "f1": float(f1),
            "support": int(support),
            **_areas(labels == index, probabilities[:, index]),
        }
        for index, name, precision, recall, f1, support in zip(classes, names, *each, strict=True)
    ]


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
        false, true, _ = scores.roc_curve(own, score)
        precision, recall, _ = scores.precision_recall_curve(own, score)
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
    false, true, thresholds = scores.roc_curve(own, score)
    kept = _kept(false, true)
    # The first threshold is above every score: it is infinite, which JSON cannot say.
    found = zip(false[kept], true[kept], thresholds[kept].clip(0, 1), strict=True)
    return [[round(float(value), 5) for value in point] for point in found]


def calibration(labels: Labels, logits: Floats) -> dict[str, Any]:
    """Return the expected calibration error of the likeliest class, and its reliability curve.

    The error is the mean of |accuracy - confidence| over `BINS` bins of equal width, weighted by
    their examples (Guo et al. 2017).
    """
    confidence = np.clip(softmax(logits).max(axis=1).astype(np.float64), 0, 1)
    right = logits.argmax(axis=1) == labels
    accuracy, mean = calibration_curve(right, confidence, n_bins=BINS)
    edges = np.linspace(0, 1, BINS + 1)
    counts = np.bincount(np.searchsorted(edges[1:-1], confidence), minlength=BINS)
    counts = counts[counts > 0]
    bins = [
        {"confidence": float(sure), "accuracy": float(true), "examples": int(count)}
        for sure, true, count in zip(mean, accuracy, counts, strict=True)
    ]
    return {"error": float(np.average(np.abs(accuracy - mean), weights=counts)), "bins": bins}


def confusion(labels: Labels, logits: Floats) -> list[list[int]]:
    """Return the confusion matrix; a row is a true class."""
    classes = list(range(logits.shape[1]))
    with warnings.catch_warnings():
        # Of a single class it warns that all classes should be named, as they are.
        warnings.filterwarnings("ignore", "A single label was found", UserWarning)
        matrix = scores.confusion_matrix(labels, logits.argmax(axis=1), labels=classes)
    rows: list[list[int]] = matrix.tolist()
    return rows


def _areas(own: npt.NDArray[np.bool_], score: Floats) -> dict[str, float | None]:
    if not 0 < own.sum() < len(own):
        return {"roc_auc": None, "pr_auc": None}
    return {
        "roc_auc": float(scores.roc_auc_score(own, score)),
        "pr_auc": float(scores.average_precision_score(own, score)),
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


def intervals(labels: Labels, logits: Floats) -> dict[str, Interval]:
    """Return the 95 % interval [low, high] of every metric of `headline`, by name."""
    classes, count = logits.shape[1], len(labels)
    # Who draws examples draws cells of the confusion matrix; there are far fewer of them.
    cells, filled = np.unique(labels * classes + logits.argmax(axis=1), return_counts=True)
    true, guess = np.divmod(cells, classes)
    generator, drawn = np.random.default_rng(_SEED), []
    for some in _parts(len(cells)):
        for each in generator.multinomial(count, filled / count, some):
            hits = np.where(true == guess, each, 0)
            sums = ((true, hits), (true, each), (guess, each))
            counts = (np.bincount(own, weights, classes) for own, weights in sums)
            drawn.append([*averages(*counts).values()])
    return {**intervals_of_means(labels, logits), **_percentiles(AVERAGES, drawn)}


def intervals_of_means(labels: Labels, logits: Floats) -> dict[str, Interval]:
    """Return the intervals of `MEANS` alone: fast enough for many small parts."""
    generator, count, each = np.random.default_rng(_SEED), len(labels), losses(labels, logits)
    loss = [
        each[generator.integers(0, count, (some, count))].mean(axis=1) for some in _parts(count)
    ]
    shares = [(logits.argmax(axis=1) == labels).mean(), in_top(labels, logits).mean()]
    drawn = [
        np.concatenate(loss),
        *(generator.binomial(count, p, RESAMPLES) / count for p in shares),
    ]
    return _percentiles(MEANS, np.transpose(drawn))


def averages(hits: Counts, support: Counts, predicted: Counts) -> dict[str, float]:
    """Return macro and weighted precision, recall and F1 from the counts of each class.

    They are how often it was predicted rightly, is the label (`support`), and was predicted. As
    `headline` does, but fast enough for a thousand resamples of a thousand classes.
    """
    occurs = (support + predicted) > 0
    each = (
        hits / np.maximum(predicted, 1),
        hits / np.maximum(support, 1),
        2 * hits / np.maximum(support + predicted, 1),
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
