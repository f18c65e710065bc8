"""How sure a figure is: percentile bootstrap over the examples (Efron 1979)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.figures import Floats, Labels, in_top, losses

RESAMPLES = 1000
CONFIDENCE = 0.95
# Figures that are means over the examples.
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
    """Return the 95 % interval [low, high] of every figure of `figures.headline`, by name."""
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

    As `figures.headline` does, but fast enough for a thousand resamples of a thousand classes.

    Args:
        hits: how often the class was predicted rightly.
        support: how often it is the label.
        predicted: how often it was predicted.
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
