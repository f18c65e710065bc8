"""Evaluates the baselines on the test examples, for `metrics.json`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from flotilla.trainer.baselines.baselines import Baseline, fit_baselines
from flotilla.trainer.baselines.rows import Splits
from flotilla.trainer.config.thresholds import SHARES, ChampionRule
from flotilla.trainer.evaluation.comparison import Opponents, compare
from flotilla.trainer.evaluation.predictions import measure_predictions, unsound
from flotilla.trainer.evaluation.threshold import compute_thresholds
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks.base import Examples, Part
from flotilla.trainer.tasks.objective import Objective, select_rows

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
