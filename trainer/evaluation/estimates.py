"""Estimates the influence of each unit on a metric of a model.

A unit is an example or, for a ranking, a query, because the scores of a query are dependent. The
method depends on the metric:

    a mean       the distance of each unit's value from the mean
    an area      the exact influence of each example
    any other    the delete-a-group jackknife: units are divided into groups, and the metric is
                 recomputed without each group
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

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
