"""How sure a figure is: percentile bootstrap over the examples (Efron 1979)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.figures import Floats, Labels, in_top, losses

RESAMPLES = 1000
CONFIDENCE = 0.95
# Figures that are means over the examples.
MEANS = ("loss", "accuracy", "top_3_accuracy")
# The same predictions give the same intervals.
_SEED = 0

Interval = list[float]
Counts = npt.NDArray[np.integer[Any]]


def intervals(labels: Labels, logits: Floats) -> dict[str, Interval]:
    """Return the 95 % interval [low, high] of every figure of `figures.headline`, by name."""
    classes = logits.shape[1]
    cells = labels * classes + logits.argmax(axis=1)
    table = _means(labels, logits)
    drawn = []
    for rows in _resamples(len(labels)):
        matrix = np.bincount(cells[rows], minlength=classes**2).reshape(classes, classes)
        drawn.append([*table[rows].mean(axis=0), *averages(matrix).values()])
    return _percentiles((*MEANS, *averages(matrix)), drawn)


def intervals_of_means(labels: Labels, logits: Floats) -> dict[str, Interval]:
    """Return the intervals of `MEANS` alone: fast enough for many small parts."""
    table = _means(labels, logits)
    return _percentiles(MEANS, [table[rows].mean(axis=0) for rows in _resamples(len(labels))])


def averages(matrix: Counts) -> dict[str, float]:
    """Return macro and weighted precision, recall and F1 of a confusion matrix [true, predicted].

    As `figures.headline` does, but fast enough for a thousand matrices.
    """
    hits, support, predicted = np.diag(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    occurs = (support + predicted) > 0
    by_name = {
        "precision": hits / np.maximum(predicted, 1),
        "recall": hits / np.maximum(support, 1),
        "f1": 2 * hits / np.maximum(support + predicted, 1),
    }
    found = {f"macro_{name}": float(values[occurs].mean()) for name, values in by_name.items()}
    for name, values in by_name.items():
        found[f"weighted_{name}"] = float(np.average(values, weights=support))
    return found


def _means(labels: Labels, logits: Floats) -> Floats:
    right = logits.argmax(axis=1) == labels
    return np.stack([losses(labels, logits), right, in_top(labels, logits)], axis=1)


def _resamples(count: int) -> Any:
    generator = np.random.default_rng(_SEED)
    return (generator.integers(0, count, count) for _ in range(RESAMPLES))


def _percentiles(names: tuple[str, ...], drawn: Sequence[Any]) -> dict[str, Interval]:
    outside = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(drawn, [outside, 100 - outside], axis=0)
    return {name: [float(low[at]), float(high[at])] for at, name in enumerate(names)}
