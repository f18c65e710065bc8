"""The 95 % interval of a metric from its standard error, on a scale that ends where it ends.

A share never leaves 0 to 1, an error never falls below 0, and an explained variance never exceeds
1: shares are taken on the scale of their log-odds, errors on that of their logarithm, both with
quantiles of t. Examples of one kind, such as the few positive ones, may all be alike, and then the
standard error is 0: a share `unseen` of examples of another kind may still be there (Wilson 1927,
of no hit among so many), and an interval always reaches to what the metric would be with them.

`count` is the number of examples of equal weight that would be as much (Kish 1965, section 11.7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

CONFIDENCE = 0.95
Interval = list[float]
Floats = npt.NDArray[np.floating[Any]]
_OUTSIDE = (1 + CONFIDENCE) / 2
# Of a normal distribution, half of what is outside on each side.
NORMAL = float(special.ndtri(_OUTSIDE))
_TINY = 1e-12


def kish(weight: Any, squares: Any) -> Any:
    """Return how many examples of equal weight are as much, of sums of weights and squares."""
    weight, squares = np.asarray(weight, np.float64), np.asarray(squares, np.float64)
    return np.divide(weight**2, squares, out=np.zeros_like(weight), where=squares > 0)


def wilson(share: Any, count: Any, normal: float = NORMAL) -> tuple[Any, Any]:
    """Return the ends of the score intervals of shares (Wilson 1927, J. Am. Stat. Assoc. 22).

    SciPy's takes whole counts. Of no examples a share is anything.
    """
    share, count = np.asarray(share, np.float64), np.asarray(count, np.float64)
    inside = np.maximum(share * (1 - share), 0) * count + normal**2 / 4
    margin = normal * np.sqrt(inside) / (count + normal**2)
    near = middle(share, count, normal)
    return np.maximum(near - margin, 0), np.minimum(near + margin, 1)


def middle(share: Any, count: Any, normal: float = NORMAL) -> Any:
    """Return the middle of the score interval of a share."""
    return (share * count + normal**2 / 2) / (count + normal**2)


def share_interval(share: float, count: float) -> Interval:
    """Return that of a share of the examples."""
    return [float(each) for each in wilson(share, count)]


def metric_interval(
    value: float, error: float, count: float, unseen: Sequence[float] = (0, 1)
) -> Interval:
    """Return that of a metric from 0 to 1; of examples that were not seen it is one of `unseen`."""
    if not count > 1:
        return [0.0, 1.0]
    ends = [value]
    if error > 0 and _TINY < value < 1 - _TINY:
        odds, slope = special.logit(value), value * (1 - value)
        margin = _t(count) * error / slope
        ends += [special.expit(odds - margin), special.expit(odds + margin)]
    share = NORMAL**2 / (count + NORMAL**2)
    ends += [value + share * (other - value) for other in unseen]
    return [float(min(ends)), float(max(ends))]


def above_zero(value: float, error: float, count: float, unseen: float = 0.0) -> Interval | None:
    """Return that of a metric without a largest value; None of one example."""
    if not (count > 1 and np.isfinite([value, error]).all()):
        return None
    # A factor that no number holds is as good as none.
    margin = min(_t(count) * error / value, 300.0) if value > 0 else 0.0
    share = NORMAL**2 / (count + NORMAL**2)
    high = max(value * math.exp(margin), value + share * (unseen - value))
    return [float(value * math.exp(-margin)), float(high)]


def below_one(value: float, error: float, count: float) -> Interval | None:
    """Return that of a share of variance that is explained, which has no least value."""
    found = above_zero(1 - value, error, count)
    return [1 - found[1], 1 - found[0]] if found else None


def mean_interval(values: Floats, ends: Sequence[Floats], inflation: float) -> Interval:
    """Return that of a mean of values from 0 to 1 by those of each of them (Zou and Donner 2008).

    How far each end is from its value adds up by squares; `inflation` is that of their sum for
    values that vary together.
    """
    low, high = (
        float(np.sqrt(inflation * ((end - values) ** 2).sum())) / len(values) for end in ends
    )
    return [max(float(values.mean()) - low, 0.0), min(float(values.mean()) + high, 1.0)]


def _t(count: float) -> float:
    return float(special.stdtrit(count - 1, _OUTSIDE))
