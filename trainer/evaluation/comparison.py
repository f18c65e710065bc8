"""Compares a challenger with a champion by one metric on the same examples.

The test is a paired non-inferiority test. It gives the difference of the metric, challenger minus
champion, and a one-sided bound. At a confidence of 0.99, the true difference is worse than the
bound in at most 1 of 100 test sets. The bound, not the difference, is compared with the margin, so
that with too few examples a model is refused rather than passed.

    compare_shares   for fractions of correct predictions: Tango's score interval of paired counts
                     (1998, Statistics in Medicine 17); at a difference of 0 it is McNemar's test
    compare_paired   for all other metrics: a t test on the differences between both models in the
                     influence of each example on the metric. For the area under the ROC curve it
                     is the test of DeLong, DeLong and Clarke-Pearson (1988, Biometrics 44)

The influence is estimated for each unit: an example or, for a ranking, a query, because the scores
of a query are dependent. The method depends on the metric:

    a mean       the distance of each unit's value from the mean
    an area      the exact influence of each example
    any other    the delete-a-group jackknife: units are divided into groups, and the metric is
                 recomputed without each group
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from scipy import special

from flotilla.trainer.config.thresholds import ChampionRule, present_name
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.areas import influences
from flotilla.trainer.tasks.base import Array, Examples, Floats, Part, Task, Whole, sample_examples
from flotilla.trainer.tasks.compiled import State
from flotilla.trainer.tasks.objective import Objective, select_rows

#: Values of the units, and the weights of these values.
Values = tuple[Floats, Floats]
# Number of jackknife groups.
_GROUPS = 100
# Maximum number of examples, and number of groups, for metrics without a state. These metrics are
# recomputed for each group.
_MOST_EXAMPLES, _FEW_GROUPS = 20_000, 40
# Maximum number of scores in memory, over all classes.
_MOST_SCORES = 20_000_000
_AREAS = ("auc", "average_precision")


class Estimate(NamedTuple):
    """A metric, and the influence of each unit on it. The influences add up to 0.

    The sum of their squares is the variance of the metric. `fewest` is the number of units that
    limits the precision: all units, or the units of the rarer class.
    """

    value: float
    influences: Floats
    fewest: int

    def sum_units(self, units: npt.NDArray[Any]) -> Estimate:
        """Add up the influences of examples by unit. `units` has the unit of each example."""
        added: Floats = np.bincount(units, self.influences).astype(np.float64)
        return self._replace(influences=added, fewest=min(self.fewest, len(added)))


def mean(values: Floats, weights: Floats | None = None) -> Estimate:
    """Return the weighted mean of values [n], with the influence of each. Weights may be 0."""
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
    shares = weights / max(weights.sum(), 1e-300)
    value = float(shares @ values)
    fewest = int(np.count_nonzero(weights))
    return Estimate(value, shares * (values - value) * correct_bias(fewest), fewest)


def correct_bias(count: int) -> float:
    """Return the factor that corrects a standard error for a small sample of `count` units."""
    return float(np.sqrt(count / (count - 1))) if count > 1 else 1.0


@dataclass(frozen=True)
class Metric:
    """A metric of a model. `state` is None if the metric is not computed from sums."""

    objective: Objective
    examples: Examples
    name: str
    state: State | None

    @classmethod
    def make(cls, objective: Objective, examples: Examples, name: str) -> Metric:
        """Create the metric with this name, and find its state."""
        total = np.asarray(sum(objective.sums(part) for part in examples.parts()))
        states = (each for each in objective.states if each.values(total).get(name) is not None)
        return cls(objective, examples, name, next(states, None))

    @cached_property
    def values(self) -> Values | None:
        """The values and weights whose mean is the metric, or None if the metric is not a mean."""
        if (groups := self._groups) is not None:
            return groups, np.ones(len(groups))
        if self.state is None or not self.state.is_mean:
            return None
        place = self.objective.states.index(self.state)
        each = [self.objective.example_states(place, part) for part in self.examples.parts()]
        totals, weights = np.concatenate(each).T
        # The value of an example with weight 0 has no effect. Use 0 to avoid a division by zero.
        return np.divide(totals, weights, out=np.zeros_like(totals), where=weights != 0), weights

    @cached_property
    def _groups(self) -> Floats | None:
        return self.objective.task.group_values(self.name, self.examples)

    @cached_property
    def units(self) -> Array | None:
        """The index of each example's unit, or None if each example is a unit."""
        unit = self.objective.task.unit
        if not unit:
            return None
        ids = np.concatenate([part.columns[unit] for part in self.examples.parts()])
        return np.unique(ids, return_inverse=True)[1]

    def estimate(self) -> Estimate:
        """Return the metric, and the influence of each unit on it."""
        name, task = _output(self.objective.task, self.name)
        area = self.name.removeprefix(f"{name}_" if name else "").removeprefix("macro_")
        if self.values is not None:
            found = mean(*self.values)
            if self._groups is not None:
                return found
        elif area in _AREAS and task.labels:
            found = self._area(area, name, task)
        else:
            return self._jackknife()
        return found if self.units is None else found.sum_units(self.units)

    def _area(self, area: str, name: str, task: Task) -> Estimate:
        most = max(_MOST_SCORES // len(task.labels), 1)
        if self.examples.count <= most or self.units is not None:
            return _mean_area(area, *_collect_scores(task, name, self.examples.parts()))
        found = _mean_area(
            area, *_collect_scores(task, name, [sample_examples(self.examples, most)])
        )
        scale = np.sqrt(len(found.influences) / self.examples.count)
        return found._replace(
            value=self._measure(self.examples), influences=found.influences * scale
        )

    def _jackknife(self) -> Estimate:
        if self.state is None:
            value, without, scale = self._jackknife_details()
        else:
            sums, function = self._sums_of_groups(self.state), self.state.function(self.name)
            total, scale = sums.sum(axis=0), 1.0
            value, without = function(total), [function(total - each) for each in sums]
        added = np.mean(without) - np.asarray(without)
        scale *= np.sqrt(1 - 1 / len(without))
        return Estimate(value, scale * added, len(without))

    def _sums_of_groups(self, state: State) -> Floats:
        """Return the state of each random group [groups, size]. All models use the same groups."""
        generator, count = np.random.default_rng(0), self.examples.count
        groups, begun, block = min(_GROUPS, count), 0, 0
        found = np.zeros((groups, state.end - state.begin))
        for part in self.examples.parts():
            rows = _count_examples(part)
            if self.units is None:
                # Divide a small part among few groups, because each group needs a separate call.
                blocks = -(-groups * rows // count)
                places = (block + generator.permutation(rows) % blocks) % groups
                block += blocks
            else:
                places = self.units[begun : begun + rows] % groups
            begun += rows
            for place in np.unique(places):
                sums = self.objective.sums(select_rows(part, np.flatnonzero(places == place)))
                found[place] += sums[state.begin : state.end]
        return found

    def _jackknife_details(self) -> tuple[float, list[float], float]:
        """Return the metric, its values without each group of a sample, and a scale factor."""
        some = sample_examples(self.examples, _MOST_EXAMPLES)
        count = _count_examples(some)
        order = np.random.default_rng(0).permutation(count)
        groups = np.array_split(order, min(_FEW_GROUPS, count))
        without = [
            self._measure(Whole(select_rows(some, np.setdiff1d(order, each)))) for each in groups
        ]
        scale = float(np.sqrt(count / self.examples.count))
        return self._measure(self.examples), without, scale

    def _measure(self, examples: Examples) -> float:
        for found in _cheapest_first(self.objective, examples):
            if self.name in found.get("metrics", {}):
                value = found["metrics"][self.name]
                return np.nan if value is None else float(value)
        return np.nan


def _output(task: Task, metric: str) -> tuple[str, Task]:
    names = [each for each in task.parts if each and metric.startswith(f"{each}_")]
    name = max(names, key=len, default="")
    return name, task.parts.get(name, task)


def _collect_scores(task: Task, name: str, parts: Iterable[Part]) -> tuple[Array, Floats, Floats]:
    found = []
    for part in parts:
        labels, outputs = (each[name] if name else each for each in (part.labels, part.outputs))
        labels, scores = task.scored(labels, outputs)
        weights = np.ones(len(labels)) if part.weights is None else np.ravel(part.weights)
        found.append((labels, scores, weights.astype(np.float64)))
    labels, scores, weights = (np.concatenate(each) for each in zip(*found, strict=True))
    return labels, scores, weights


def _mean_area(area: str, labels: Array, scores: Floats, weights: Floats) -> Estimate:
    values, added, fewest = [], np.zeros(len(weights)), len(weights)
    for column, score in enumerate(scores.T):
        yes = labels == column if labels.ndim == 1 else labels[:, column].astype(bool)
        kinds = [int(np.count_nonzero(weights[each])) for each in (yes, ~yes)]
        if not all(kinds):
            continue
        found, of_each = influences(yes, score, weights)
        values.append(getattr(found, area))
        # The rarer of two classes limits the precision.
        added += getattr(of_each, area) * weights * np.where(yes, *map(correct_bias, kinds))
        fewest = min(kinds) if scores.shape[1] == 1 else fewest
    if not values:
        return Estimate(np.nan, added, 0)
    return Estimate(float(np.mean(values)), added / len(values), fewest)


def _cheapest_first(objective: Objective, examples: Examples) -> Iterator[dict[str, Any]]:
    tally = objective.task.tally()
    for part in examples.parts():
        tally.add(part)
    yield tally.result()
    yield objective.task.details(examples)


def _count_examples(part: Part) -> int:
    return len(tf.nest.flatten(part.labels)[0])


Direction = Literal["higher", "lower"]
# Number of bisections that reduce an interval of length 2 to the rounding error.
_HALVINGS = 50
_TINY = 1e-300


class Compared(NamedTuple):
    """The difference of a metric, challenger minus champion, and its one-sided bound."""

    difference: float
    bound: float
    method: str


class Pairs(NamedTuple):
    """The number of examples for each combination of right and wrong predictions."""

    both_right: int
    only_challenger_right: int
    only_champion_right: int
    both_wrong: int


def compare_shares(pairs: Pairs, confidence: float) -> Compared:
    """Compare two fractions of correct predictions by Tango's score interval."""
    count, own, other = sum(pairs), pairs.only_challenger_right, pairs.only_champion_right
    first, second, third = np.array([[own], [other], [count]], np.float64)
    bound = lower_bounds(first, second, third, confidence)
    return Compared((own - other) / count, float(bound[0]), "Tango's score interval")


def lower_bounds(own: Floats, other: Floats, count: Floats, confidence: float) -> Floats:
    """Return Tango's lower bounds for differences between fractions.

    Args:
        own: for each difference, the number of examples that only the challenger gets right.
        other: the number of examples that only the champion gets right.
        count: the number of all examples, which may be fractional.
        confidence: the confidence of each bound.
    """
    wanted = special.ndtri(confidence)
    # Do not compute the score at -1. It is infinite there, or undefined if all examples were lost.
    low, high = np.full(len(own), -1.0), (own - other) / count
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        beyond = _scores(own, other, count, middle) > wanted
        low, high = np.where(beyond, middle, low), np.where(beyond, high, middle)
    return low


def _scores(own: Floats, other: Floats, count: Floats, assumed: Floats) -> Floats:
    """Return the observed minus the assumed differences, in standard errors."""
    b = (2 * count - own + other) * assumed - own - other
    c = -other * assumed * (1 - assumed)
    likeliest = (np.sqrt(np.maximum(b * b - 8 * count * c, 0)) - b) / (4 * count)
    variance = count * (2 * likeliest + assumed * (1 - assumed))
    excess = own - other - count * assumed
    result: Floats = excess / np.sqrt(np.maximum(variance, _TINY))
    return result


def compare_paired(
    own: Estimate, other: Estimate, confidence: float, better: Direction, lost: float = 0.0
) -> Compared:
    """Compare a metric of two models by the influences of the units.

    If the margin is a fraction of the champion's gain over a constant, `lost` is that fraction.
    This margin varies with the champion's metric, and is therefore not treated as exact.
    """
    sign, difference = (1 if better == "higher" else -1), own.value - other.value
    fewest = min(own.fewest, other.fewest)
    reach = max(
        _reach(sign * (own.influences - kept * other.influences), fewest, confidence)
        for kept in {1.0, 1.0 - lost}
    )
    bound = difference - sign * reach
    return Compared(float(difference), float(bound), "t test of paired influences")


def _reach(terms: Floats, fewest: int, confidence: float) -> float:
    """Return an upper bound for the deviation of a sum of independent terms.

    The degrees of freedom are Satterthwaite's (1946, Biometrics Bulletin 2): there are few if a few
    terms dominate the variance. The correction for skewness is Hall's (1992, J. R. Statist. Soc. B
    54), and is applied only if it widens the bound.
    """
    if fewest <= 1:
        return np.inf
    squares = terms**2
    second, fourth = squares.sum(), (squares**2).sum()
    if second <= _TINY:
        return 0.0
    spread = max(fourth - second**2 / len(terms), _TINY)
    freedom = min(2 * second**2 / spread, fewest - 1)
    wanted = float(special.stdtrit(freedom, confidence))
    skewness = float((squares * terms).sum() / second**1.5)
    if skewness:
        third = 3 / skewness
        wanted = max(wanted, third * (np.cbrt(1 + skewness * wanted - skewness**2 / 6) - 1))
    return float(wanted * np.sqrt(second))


_KEY = "gate.champion"


@dataclass(frozen=True, kw_only=True)
class Opponents:
    """Predictions of two models for the same examples, in the same order and parts.

    `theirs` is the objective of the other model, if its decision thresholds differ.
    """

    objective: Objective
    own: Examples
    other: Examples
    theirs: Objective | None = None

    @property
    def others(self) -> Objective:
        """The objective of the other model."""
        return self.theirs or self.objective


def compare(opponents: Opponents, rule: ChampionRule) -> dict[str, Any]:
    """Compare the models by a rule's metric. Raises `UserError`.

    The result has `metric`, `better`, `difference`, `bound`, `confidence`, `method` and `examples`,
    and also `pairs` if each prediction is either right or wrong.
    """
    metric = rule.metric or opponents.objective.main_metric
    own = Metric.make(opponents.objective, opponents.own, metric)
    other = Metric.make(opponents.others, opponents.other, metric)
    better = _direction(opponents.objective, metric, rule)
    pairs = _pairs(own.values, other.values) if better == "higher" and own.units is None else None
    if pairs:
        found = compare_shares(pairs, rule.confidence)
    else:
        both = own.estimate(), other.estimate()
        found = compare_paired(*both, rule.confidence, better, rule.share)
    return {
        "metric": metric,
        "better": better,
        "confidence": rule.confidence,
        "examples": opponents.own.count,
        "difference": found.difference if np.isfinite(found.difference) else None,
        "bound": found.bound if np.isfinite(found.bound) else None,
        "method": found.method,
        **({"pairs": pairs._asdict()} if pairs else {}),
    }


def _direction(objective: Objective, metric: str, rule: ChampionRule) -> Direction:
    known = objective.directions
    if metric not in known:
        hint = present_name(metric, known)
        raise ConfigError(
            f"{_KEY}.metric: {metric!r} is not measured{hint} (measured: {', '.join(known)})"
        )
    better = rule.better or known[metric]
    if not better:
        raise ConfigError(
            f"{_KEY}.better: cannot tell whether a higher or lower value of {metric!r} is better; "
            "set the key to higher or lower"
        )
    return better


# Whether the challenger and the champion are right, in the order of `Pairs`.
_WHO = ((1, 1), (1, 0), (0, 1), (0, 0))


def _pairs(own: Values | None, other: Values | None) -> Pairs | None:
    """Count the pairs. Return None if a weight is not 1, or a value is neither 0 nor 1."""
    if own is None or other is None or not (own[1] == 1).all():
        return None
    if not all(np.isin(values, (0, 1)).all() for values, _ in (own, other)):
        return None
    return Pairs(*(int(((own[0] == a) & (other[0] == b)).sum()) for a, b in _WHO))
