"""Association of two values of an example, from 0 (independent) to 1 (one determines the other).

For two numbers, it is the absolute rank correlation (Spearman). For a number and a class, it is the
correlation ratio (Fisher) of the ranks, because outliers would dominate the ratio of the values.
For two classes, it is Cramér's V. The last two are corrected for chance, because many classes
increase them ("A bias-correction for Cramér's V", Bergsma 2013; "epsilon squared", Kelley 1935).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Maximum number of separate classes. All rarer values together form one more class.
MOST_VALUES = 100
_FEWEST = 10
Values = NDArray[np.float64]


def measure_association(
    first: Values, second: Values, *, first_is_class: bool, second_is_class: bool
) -> float:
    """Return the association of two columns of the same examples. NaN is a missing value."""
    present = np.isfinite(first) & np.isfinite(second)
    first, second = first[present], second[present]
    if len(first) < _FEWEST:
        return 0.0
    if first_is_class and second_is_class:
        return _cramer(_encode(first), _encode(second))
    if first_is_class:
        return _ratio(_ranks(second), _encode(first))
    if second_is_class:
        return _ratio(_ranks(first), _encode(second))
    return _correlation(_ranks(first), _ranks(second))


def _ranks(values: Values) -> Values:
    """Return ranks, with the mean rank for ties. Importing SciPy for this would take too long."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Values = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return found


def _encode(values: Values) -> NDArray[np.int64]:
    """Encode values as small integers, the most frequent first. Rare values share one integer."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.empty(len(counts), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
    coded: NDArray[np.int64] = np.minimum(ranks, MOST_VALUES)[places]
    return coded


def _correlation(first: Values, second: Values) -> float:
    one, two = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((one**2).sum() * (two**2).sum()))
    return min(1.0, abs(float((one * two).sum())) / scale) if scale > 0 else 0.0


def _ratio(number: Values, classes: NDArray[np.int64]) -> float:
    counts = np.bincount(classes)
    used = counts > 0
    groups, examples = int(used.sum()), len(number)
    centred = number - number.mean()
    total = float((centred**2).sum())
    if groups < 2 or groups >= examples or total <= 0:  # noqa: PLR2004
        return 0.0
    sums = np.bincount(classes, centred)[used]
    within = total - float((sums**2 / counts[used]).sum())
    corrected = 1 - (within / (examples - groups)) / (total / (examples - 1))
    return float(np.sqrt(min(1.0, max(0.0, corrected))))


def _cramer(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    rows, columns, examples = int(first.max()) + 1, int(second.max()) + 1, len(first)
    if min(rows, columns) < 2:  # noqa: PLR2004
        return 0.0
    table = np.bincount(first * columns + second, minlength=rows * columns)
    table = table.reshape(rows, columns).astype(np.float64)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / examples
    chi = float(((table - expected) ** 2 / np.where(expected > 0, expected, 1.0)).sum())
    chance = (rows - 1) * (columns - 1) / (examples - 1)
    phi = max(0.0, chi / examples - chance)
    sizes = [size - (size - 1) ** 2 / (examples - 1) for size in (rows, columns)]
    return float(np.sqrt(min(1.0, phi / max(min(sizes) - 1, 1e-9))))
