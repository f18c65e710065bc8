"""The 95% confidence interval of a metric, computed from its standard error.

The interval lies within the metric's bounds: a fraction is between 0 and 1, an error is at least 0,
and an explained variance is at most 1. Fractions use the log-odds scale and errors the log scale,
with quantiles of Student's t. The standard error is 0 if the observed examples do not vary, for
example if all of a few positive examples are hits. Unseen examples may differ. Therefore the
interval also includes the value that the metric would have if a fraction of the examples were
unseen, as in Wilson's interval (1927) for no hits among n.

`count` is the effective number of examples (Kish 1965, section 11.7).
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
NORMAL = float(special.ndtri(_OUTSIDE))
_TINY = 1e-12


def kish(weight: Any, squares: Any) -> Any:
    """Return the effective sample size, from the sums of weights and of squared weights."""
    weight, squares = np.asarray(weight, np.float64), np.asarray(squares, np.float64)
    return np.divide(weight**2, squares, out=np.zeros_like(weight), where=squares > 0)


def wilson(share: Any, count: Any, normal: float = NORMAL) -> tuple[Any, Any]:
    """Return the ends of the score intervals of fractions (Wilson 1927, J. Am. Stat. Assoc. 22).

    Unlike SciPy's version, accept fractional counts. Without examples, the interval is 0 to 1.
    """
    share, count = np.asarray(share, np.float64), np.asarray(count, np.float64)
    inside = np.maximum(share * (1 - share), 0) * count + normal**2 / 4
    margin = normal * np.sqrt(inside) / (count + normal**2)
    near = middle(share, count, normal)
    return np.maximum(near - margin, 0), np.minimum(near + margin, 1)


def middle(share: Any, count: Any, normal: float = NORMAL) -> Any:
    """Return the midpoint of Wilson's score interval of a fraction."""
    return (share * count + normal**2 / 2) / (count + normal**2)


def share_interval(share: float, count: float) -> Interval:
    """Return the interval of a fraction of the examples."""
    return [float(each) for each in wilson(share, count)]


def metric_interval(
    value: float, error: float, count: float, unseen: Sequence[float] = (0, 1)
) -> Interval:
    """Return the interval of a metric in [0, 1]. `unseen` lists possible values on unseen data."""
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
    """Return the interval of a metric that is at least 0 and has no upper bound.

    The result is None if `count` is at most 1, or if the value or the error is not finite.
    """
    if not (count > 1 and np.isfinite([value, error]).all()):
        return None
    # Limit the exponent, so that `exp` does not overflow. The bound is practically infinite then.
    margin = min(_t(count) * error / value, 300.0) if value > 0 else 0.0
    share = NORMAL**2 / (count + NORMAL**2)
    high = max(value * math.exp(margin), value + share * (unseen - value))
    return [float(value * math.exp(-margin)), float(high)]


def below_one(value: float, error: float, count: float) -> Interval | None:
    """Return the interval of a metric that is at most 1, or None in the cases of `above_zero`."""
    found = above_zero(1 - value, error, count)
    return [1 - found[1], 1 - found[0]] if found else None


def mean_interval(values: Floats, ends: Sequence[Floats], inflation: float) -> Interval:
    """Return the interval of the mean of values between 0 and 1 (Zou and Donner 2008).

    `ends` are the lower and the upper ends of the values' intervals. Their squared distances from
    the values are added, and `inflation` corrects the sum for dependent values.
    """
    low, high = (
        float(np.sqrt(inflation * ((end - values) ** 2).sum())) / len(values) for end in ends
    )
    return [max(float(values.mean()) - low, 0.0), min(float(values.mean()) + high, 1.0)]


def _t(count: float) -> float:
    return float(special.stdtrit(count - 1, _OUTSIDE))
