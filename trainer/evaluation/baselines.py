"""Compares a model with the best constant, which ignores the inputs, and with simple models.

`metrics.json` has `baselines`, with a row for each simple model, and `constant`:

    {"answer": a description of the best constant by the main metric,
     "metrics": {name: the best value of any constant},
     "paired": the comparison with the best constant, see `comparison.compare`,
     "champion": whether the champion, if any, has a better main metric than the constant}

The best constant is fitted to the labels of the evaluated examples, so that no model that ignores
its inputs can be better. `paired` also has `constant`, the value to beat. If the metric is
undefined for these examples, the values are null and no model passes. Otherwise one of two tests is
used:

    by example   the paired test of the metric, with the constant as the opponent
    shuffled     for areas and averages over classes: a permutation test of the outputs. If a
                 model is uninformative, all orders of its outputs are equally likely. Therefore
                 the level is exact, however rare a class is (Fisher 1935)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from flotilla.trainer.baselines.baselines import Baseline, fit_baselines
from flotilla.trainer.baselines.rows import Splits
from flotilla.trainer.config.thresholds import SHARES, ChampionRule
from flotilla.trainer.evaluation.comparison import Opponents, compare
from flotilla.trainer.evaluation.predictions import measure_predictions, unsound
from flotilla.trainer.evaluation.threshold import compute_thresholds
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import UserError
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

#: Confidence of the test against the constant: at most 1 in 200 uninformative models passes.
CONFIDENCE = 0.995
# Number of permutations. Their second-highest value is the quantile at `CONFIDENCE`.
_SHUFFLES = 399
# Limits for a permutation: the maximum numbers of examples and of label values, and the minimum
# number of examples.
_MOST_SHUFFLED, _MOST_NUMBERS, _LEAST = 50_000, 2_000_000, 500
# A mean of permuted metrics that is this many standard deviations above the constant is not due to
# chance.
_FAR = 3
_BUILT_IN = "flotilla.trainer.tasks."
_log = logging.getLogger(__name__)


def compare_constant(
    objective: Objective, own: Examples, metrics: Mapping[str, float | None], metric: str
) -> dict[str, Any]:
    """Return the entry `constant` of `metrics.json`. `metric` is the main metric."""
    best = _best(objective, own)
    values = {name: each.value for name, each in best.items()}
    mine, better = metrics.get(metric), objective.directions.get(metric)
    value, constant = best.get(metric) or (None, None)
    if not better or (constant is None and mine is not None):
        # A metric without a direction has no best value.
        return {"answer": "", "metrics": values, "paired": None}
    if value is not None and mine is not None and math.isclose(value, mine):
        # Treat the values as equal, because sums in another order differ by rounding errors.
        value = mine
    unit = objective.task.unit
    paired: dict[str, Any] = {"constant": value, "answer": constant.answer if constant else ""}
    if mine is None or value is None or constant is None:
        # The metric is undefined. For example, the area under a curve requires two classes.
        paired |= {"metric": metric, "better": better, "difference": None, "bound": None}
        paired |= {"examples": own.count, "confidence": CONFIDENCE}
    elif not unit and (by_chance := compare_shuffled(objective, own, metric, mine, value)):
        # Grouped examples must stay together, and therefore cannot be permuted.
        paired |= by_chance
    else:
        rule = ChampionRule(metric=metric, margin=0.0, confidence=CONFIDENCE)
        other = LazyExamples(own, constant.apply)
        paired |= compare(Opponents(objective=objective, own=own, other=other), rule)
    if constant:
        values[metric] = paired["constant"]
    return {"answer": paired.pop("answer"), "metrics": values, "paired": paired}


def is_beaten(found: Mapping[str, Any], metrics: Mapping[str, float | None]) -> bool | None:
    """Return whether a champion's main metric is better than the constant's, or None if unknown."""
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
    candidates = [*objective.task.constants(own), _mean(own)]
    examples = _condense(objective, own)
    best: dict[str, _Best] = {}
    for each in candidates:
        values = _measure(objective, LazyExamples(examples, each.apply))
        for name, better in objective.directions.items():
            value = values.get(name)
            if not better or value is None:
                continue
            sign, known = (1 if better == "higher" else -1), best.get(name)
            if known is None or sign * value > sign * known.value:
                best[name] = _Best(float(value), each)
    return best


def _mean(own: Examples) -> Constant:
    """Return the mean output. For a convex loss, it is no worse than outputs in random order."""

    def output(part: Part, place: int) -> Array:
        found: Array = tf.nest.flatten(part.outputs)[place]
        return found

    some = next(iter(own.parts())).outputs
    places = range(len(tf.nest.flatten(some)))
    rows = [weighted_mean(own, partial(output, place=each)) for each in places]
    return Constant("always the mean of its outputs", tf.nest.pack_sequence_as(some, rows))


def _condense(objective: Objective, own: Examples) -> Examples:
    """Merge examples with equal labels, and add their weights, if this changes no metric.

    A constant has the same outputs for all examples, so only labels and weights matter.
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
    # The loss is divided by the number of examples, not by their weight, so scale the weights.
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
            # A user's task may not support equal outputs for all examples.
            _log.warning(
                "could not compute some metrics of a constant prediction: %s",
                user_code.format_error(error),
            )
    return found


def _is_built_in(objective: Objective) -> bool:
    return type(objective.task).__module__.startswith(_BUILT_IN)


def compare_shuffled(
    objective: Objective, own: Examples, metric: str, mine: float, constant: float
) -> dict[str, Any]:
    """Compare a model with a constant by a permutation test. Return {} if this is impossible."""
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
        # The sample may lack a rare class, so that the metric is undefined.
        return {}
    more: dict[str, Any] = {"constant": constant}
    if values.mean() - constant > _FAR * values.std():
        # Report the mean of random orders if it clearly exceeds the constant, as for macro F1.
        answer = "its outputs assigned to other examples"
        more = {"constant": float(values.mean()), "answer": answer}
    # A random order may beat the constant, for example in average precision if positives are rare.
    gain = mine - max(constant, float(values.mean()))
    # Chance differences are smaller in the whole split than in the sample. Scale them down.
    bound = gain - float(values[-2] - values.mean()) * math.sqrt(count / own.count)
    # Use the test only for a whole split. The statistic of a sample is not sufficient evidence.
    if count == own.count:
        above, critical = (float(each - evidence.mean()) for each in (found[1], evidence[-2]))
        if above <= critical:
            bound = min(bound, 0.0)
        elif gain > 0:
            # Compute the test-based confidence limit (Miettinen 1976).
            bound = gain - gain * critical / above
    return {
        "metric": metric,
        "better": "higher",
        "confidence": CONFIDENCE,
        "examples": own.count,
        "difference": mine - more["constant"],
        "bound": max(bound, -more["constant"]),
        "method": "its outputs assigned to other examples",
        **more,
    }


# The one-sided confidence of each bound. Two bounds form a 95% interval.
_RULE = ChampionRule(margin=0.0, confidence=0.975)


@dataclass(frozen=True, kw_only=True)
class _First:
    """The first `count` of the examples. If `outputs` is set, it replaces the model's outputs."""

    examples: Examples
    count: int
    outputs: Any = None

    def parts(self) -> Iterator[Part]:
        begin = 0
        for part in self.examples.parts():
            size = min(len(tf.nest.flatten(part.labels)[0]), self.count - begin)
            some = select_rows(part, slice(size))
            if self.outputs is not None:
                some = some._replace(outputs=select_rows(self.outputs, slice(begin, begin + size)))
            yield some
            begin += size
            if begin >= self.count:
                return


def judge_baselines(objective: Objective, own: Examples, splits: Splits) -> list[dict[str, Any]]:
    """Return the baselines of a task, with their metrics and a comparison with the model.

    `beats` indicates whether the baseline is significantly better than the model.
    """
    return [_judge(objective, own, each) for each in fit_baselines(objective.task, splits)]


def _judge(objective: Objective, own: Examples, baseline: Baseline) -> dict[str, Any]:
    names = ("name", "made_by", "rows", "of_rows", "seconds")
    found: dict[str, Any] = {name: getattr(baseline, name) for name in names}
    found |= {"metrics": {}, "paired": {}, "beats": False, "skipped": baseline.skipped}
    if not baseline.skipped and (bad := unsound(baseline.outputs)):
        found["skipped"] = f"it returns non-finite numbers for {bad} examples"
    if found["skipped"]:
        return found
    count = len(tf.nest.flatten(baseline.outputs)[0])
    model = _First(examples=own, count=count)
    other = _First(examples=own, count=count, outputs=baseline.outputs)
    theirs = objective
    if baseline.validation:
        decided = [name for name, part in objective.task.parts.items() if part.positive_by]
        theirs = objective.set_thresholds(compute_thresholds(decided, *baseline.validation))
    try:
        metrics = measure_predictions(theirs, other)["metrics"]
        paired = _compare_paired(objective, model, theirs, other)
        return {**found, "metrics": metrics, "paired": paired, "beats": _is_worse(paired)}
    # Skip a baseline that fails, so that the evaluation of the trained model succeeds. For example,
    # a metric may be undefined in a small sample of users or items.
    except Exception as error:
        why = str(error) if isinstance(error, UserError) else user_code.format_error(error)
        return {**found, "skipped": why}


def _compare_paired(
    objective: Objective, model: Examples, theirs: Objective, other: Examples
) -> dict[str, Any]:
    """Compare the model with a baseline, and add the `interval` of the difference to the result."""
    first = compare(Opponents(objective=objective, own=model, other=other, theirs=theirs), _RULE)
    turned = compare(Opponents(objective=theirs, own=other, other=model, theirs=objective), _RULE)
    bounds = first["bound"], turned["bound"]
    if None in bounds:
        return {**first, "interval": None}
    most = 1.0 if first["metric"].endswith(SHARES) else math.inf
    interval = sorted(min(max(each, -most), most) for each in (bounds[0], -bounds[1]))
    return {**first, "interval": interval}


def _is_worse(paired: dict[str, Any]) -> bool:
    low, high = paired["interval"] or (0.0, 0.0)
    return high < 0 if paired["better"] == "higher" else low > 0
