"""The best constant: the result of a model that ignores its inputs, on the same examples.

`metrics.json` has `constant`:

    {"answer": of the best one by the main metric, "metrics": {name: the best of any constant},
     "paired": the comparison with it, as `flotilla.trainer.evaluation.comparison.compare` returns
     it, "champion": whether the champion's main metric is better, if there is a champion}

The best constant is chosen from the labels of the evaluated examples, so that no model without
inputs is better. `paired` also has `constant`, the value to beat. If the examples do not define the
metric, its values are null and no model passes. Otherwise one of two tests applies:

    by example   the paired test of the metric, with the constant as the opponent
    shuffled     for areas and means over classes: a permutation test of the outputs. For an
                 uninformative model the real order is one of many equally likely ones, so that
                 the level is exact, however rare a class is (Fisher 1935)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation.comparison import Opponents, compare
from flotilla.trainer.runtime import user_code
from flotilla.trainer.tasks.base import (
    Array,
    Constant,
    Examples,
    LazyExamples,
    Part,
    Whole,
    example_weights,
    sample_examples,
    weighted_mean,
)
from flotilla.trainer.tasks.objective import Objective, select_rows

#: The confidence of the test against the constant: one of 200 uninformative models passes.
CONFIDENCE = 0.995
# Among these, the second largest is the quantile at that confidence.
_SHUFFLES = 399
# The most examples of a shuffle, the most label numbers in it, and the fewest examples.
_MOST_SHUFFLED, _MOST_NUMBERS, _LEAST = 50_000, 2_000_000, 500
# A mean that is this many standard deviations above the constant is not chance.
_FAR = 3
_BUILT_IN = "flotilla.trainer.tasks."
_log = logging.getLogger(__name__)


def compare_constant(
    objective: Objective, own: Examples, metrics: Mapping[str, float | None], metric: str
) -> dict[str, Any]:
    """Return the `constant` of `metrics.json`, by the main metric of a model."""
    best = _best(objective, own)
    values = {name: each.value for name, each in best.items()}
    mine, better = metrics.get(metric), objective.directions.get(metric)
    value, constant = best.get(metric) or (None, None)
    if not better or (constant is None and mine is not None):
        # A metric without a direction has no best value.
        return {"answer": "", "metrics": values, "paired": None}
    if value is not None and mine is not None and math.isclose(value, mine):
        # Sums in another order differ in rounding, which must not look like a real difference.
        value = mine
    unit = objective.task.unit
    paired: dict[str, Any] = {"constant": value, "answer": constant.answer if constant else ""}
    if mine is None or value is None or constant is None:
        # An undefined metric, like an area when all examples are of one class, never passes.
        paired |= {"metric": metric, "better": better, "difference": None, "bound": None}
        paired |= {"examples": own.count, "confidence": CONFIDENCE}
    elif not unit and (by_chance := compare_shuffled(objective, own, metric, mine, value)):
        # Examples of a group must stay together in a shuffle.
        paired |= by_chance
    else:
        rule = ChampionRule(metric=metric, margin=0.0, confidence=CONFIDENCE)
        other = LazyExamples(own, constant.apply)
        paired |= compare(Opponents(objective=objective, own=own, other=other), rule)
    if constant:
        values[metric] = paired["constant"]
    return {"answer": paired.pop("answer"), "metrics": values, "paired": paired}


def is_beaten(found: Mapping[str, Any], metrics: Mapping[str, float | None]) -> bool | None:
    """Return whether a champion's main metric is better than the constant's; None if unknown."""
    paired = found["paired"]
    value = metrics.get(paired["metric"]) if paired else None
    if value is None or paired["constant"] is None:
        return None
    gain = value - paired["constant"]
    return bool(gain > 0 if paired["better"] == "higher" else gain < 0)


class _Best(NamedTuple):
    value: float
    constant: Constant


def _best(objective: Objective, own: Examples) -> dict[str, _Best]:
    """Return the best value of each metric and the constant that reaches it."""
    candidates = [*objective.task.constants(own), _mean(own)]
    examples = _condense(objective, own)
    best: dict[str, _Best] = {}
    for each in candidates:
        values = _measure(objective, LazyExamples(examples, each.apply))
        for name, better in objective.directions.items():
            value = values.get(name)
            if not better or value is None:
                continue
            known = best.get(name)
            if known is None or (
                value > known.value if better == "higher" else value < known.value
            ):
                best[name] = _Best(float(value), each)
    return best


def _mean(own: Examples) -> Constant:
    """Return the mean of the model's outputs, which is the best constant for a convex loss."""

    def output(part: Part, place: int) -> Array:
        found: Array = tf.nest.flatten(part.outputs)[place]
        return found

    some = next(iter(own.parts())).outputs
    places = range(len(tf.nest.flatten(some)))
    rows = [weighted_mean(own, partial(output, place=each)) for each in places]
    return Constant("always the mean of its answers", tf.nest.pack_sequence_as(some, rows))


def _condense(objective: Objective, own: Examples) -> Examples:
    """Return one example per label with the total weight of its examples, if that is equivalent.

    A constant gives all examples of a label the same answer.
    """
    some = next(iter(own.parts()))
    weigh = all(each.measured.weighted for each in objective.states if each.measured)
    if (
        objective.task.columns
        or not weigh
        or not _is_built_in(objective)
        or isinstance(some.labels, Mapping)
        or some.labels.ndim != 1
        or some.labels.dtype.kind not in "iub"
    ):
        return own
    totals: dict[Any, float] = {}
    for part in own.parts():
        labels, place = np.unique(part.labels, return_inverse=True)
        for label, total in zip(
            labels.tolist(), np.bincount(place, example_weights(part)), strict=True
        ):
            totals[label] = totals.get(label, 0.0) + total
    weights = np.array([*totals.values()])
    # The loss is divided by the number of examples, not by their weight.
    scaled = weights * (len(weights) / own.count)
    labels = np.array([*totals], some.labels.dtype)
    return Whole(Part(labels, select_rows(some.outputs, np.zeros(len(labels), int)), scaled, {}))


def _measure(objective: Objective, examples: Examples) -> dict[str, float | None]:
    tally = objective.tally()
    for part in examples.parts():
        tally.add(part)
    found: dict[str, float | None] = tally.result()["metrics"]
    if objective.task.directions.keys() - found.keys():
        try:
            return {**objective.task.details(examples).get("metrics", {}), **found}
        except Exception as error:
            if _is_built_in(objective):
                raise
            # A user's task may not support equal answers for all examples.
            _log.warning("of a constant: %s", user_code.format_error(error))
    return found


def _is_built_in(objective: Objective) -> bool:
    return type(objective.task).__module__.startswith(_BUILT_IN)


def compare_shuffled(
    objective: Objective, own: Examples, metric: str, mine: float, constant: float
) -> dict[str, Any]:
    """Return the comparison by shuffled outputs; empty for metrics that are compared by example."""
    task, some = objective.task, next(iter(own.parts()))
    size = max(np.size(tf.nest.flatten(select_rows(some.labels, slice(1)))[0]), 1)
    part = sample_examples(own, min(_MOST_SHUFFLED, max(_MOST_NUMBERS // size, _LEAST)))
    if (tested := task.make_test(metric, part)) is None:
        return {}
    generator, count = np.random.default_rng(0), len(example_weights(part))
    found = tested(np.arange(count))
    others = [tested(generator.permutation(count)) for _ in range(_SHUFFLES)]
    values, evidence = np.sort(np.array(others, np.float64), axis=0).T
    if not np.isfinite([*values, *evidence, *found]).all():
        # A small sample may lack a rare class.
        return {}
    more: dict[str, Any] = {"constant": constant}
    if values.mean() - constant > _FAR * values.std():
        # Random classes have a higher mean F1 than any single class.
        more = {"constant": float(values.mean()), "answer": "its answers given to other examples"}
    # With few positive examples, a random order has an average precision above their share.
    gain = mine - max(constant, float(values.mean()))
    # Chance differences shrink with more examples.
    bound = gain - float(values[-2] - values.mean()) * math.sqrt(count / own.count)
    # A sample alone is not sufficient evidence for the whole split.
    if count == own.count:
        above, critical = (float(each - evidence.mean()) for each in (found[1], evidence[-2]))
        if above <= critical:
            bound = min(bound, 0.0)
        elif gain > 0:
            # A test-based limit: as far below the gain as the gain is above its critical value
            # (Miettinen 1976).
            bound = gain - gain * critical / above
    return {
        "metric": metric,
        "better": "higher",
        "confidence": CONFIDENCE,
        "examples": own.count,
        "difference": mine - more["constant"],
        "bound": max(bound, -more["constant"]),
        "method": "outputs given to other examples",
        **more,
    }
