"""Two-sample tests on stored statistics.

Comparisons of distributions return an effect size in addition to a p-value, because with many
examples even a tiny difference is significant, and with few examples even a large one is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats

# The chi-squared approximation is invalid for smaller expected counts.
_LEAST_EXPECTED = 5.0
Numbers = NDArray[np.float64]


def kolmogorov_smirnov(
    new: Numbers, old: Numbers, sizes: tuple[float, float] = (np.inf, np.inf)
) -> tuple[float, float]:
    """Return the largest distance between two distribution functions, and its p-value.

    Args:
        new: a sorted sample.
        old: another sorted sample.
        sizes: limits of the effective sample sizes, if the numbers are not independent.
    """
    at = np.union1d(new, old)
    distance = float(np.max(np.abs(_cdf(new, at) - _cdf(old, at))))
    first, second = min(len(new), sizes[0]), min(len(old), sizes[1])
    root = np.sqrt(first * second / (first + second))
    # This correction makes the limit distribution accurate for small samples (Stephens, 1970).
    return distance, float(stats.kstwobign.sf((root + 0.12 + 0.11 / root) * distance))


def _cdf(values: Numbers, at: Numbers) -> Numbers:
    return np.searchsorted(values, at, side="right") / len(values)


def exceeds(new: Numbers, old: Numbers) -> float:
    """Return P(new > old) + P(new = old) / 2, which is 1/2 for equal distributions."""
    below = np.searchsorted(old, new, side="left") + np.searchsorted(old, new, side="right")
    return float(np.mean(below) / 2 / len(old))


def homogeneity(
    new: Mapping[str, float],
    old: Mapping[str, float],
    sizes: tuple[float, float] = (np.inf, np.inf),
) -> tuple[float, float]:
    """Return the total variation distance between two tables of counts, and its p-value.

    Values with an expected count below five are merged. `sizes` limits the effective sample sizes.
    """
    names = list({**old, **new})
    table = np.array([[of.get(name, 0) for name in names] for of in (new, old)], dtype=float)
    whole = table.sum(axis=1, keepdims=True)
    if len(names) < 2 or not whole.all():  # noqa: PLR2004
        return 0.0, 1.0
    shares = table / whole
    whole = np.minimum(whole, np.array(sizes)[:, None])
    table = shares * whole
    expected = table.sum(axis=0) * whole.min() / whole.sum()
    rare = expected < _LEAST_EXPECTED
    pooled = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)])
    pooled = pooled[:, pooled.sum(axis=0) > 0]
    if pooled.shape[1] < 2:  # noqa: PLR2004
        return 0.0, 1.0
    moved = float(np.abs(shares[0] - shares[1]).sum() / 2)
    return moved, float(stats.chi2_contingency(pooled, correction=False).pvalue)


def fisher_test(part: int, of: int, known: int, whole: int) -> float:
    """Return the one-sided p-value of `part / of` > `known / whole` (Fisher's exact test)."""
    return float(stats.hypergeom.sf(part - 1, of + whole, part + known, of))


def absence_test(count: int, of: int, whole: int) -> float:
    """Return the probability that the first of two samples has all `count` examples by chance."""
    return float(stats.hypergeom.sf(count - 1, of + whole, count, of))


def holm(chances: Mapping[str, float], significance: float) -> set[str]:
    """Return the names of the significant tests, corrected for multiple testing (Holm, 1979)."""
    found = set()
    ordered = sorted(chances.items(), key=lambda each: each[1])
    for place, (name, chance) in enumerate(ordered):
        if chance > significance / (len(ordered) - place):
            break
        found.add(name)
    return found
