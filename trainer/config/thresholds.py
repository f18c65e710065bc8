"""The `gate` section: bounds of metrics, and how much worse than the champion a model may be.

The available metrics depend on the task and the model. This module checks only the form of rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from flotilla.trainer.config.base import Section, key
from flotilla.trainer.runtime.errors import nearest

#: Suffixes of the metrics whose values are between 0 and 1.
SHARES = ("accuracy", "precision", "recall", "f1", "auc", "calibration_error")
_SHORT = {
    "rmse": "root_mean_squared_error",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "r2": "r2_score",
    "acc": "accuracy",
    "roc_auc": "auc",
}
_RENAMED = {"pr_auc": ("average_precision", "macro_average_precision"), "auc": ("macro_auc",)}


# With several outputs, the output's name, which may contain any character, precedes the metric.
_METRIC = re.compile(r"(?:.*_)?[^\W\d]\w*", re.DOTALL)


def split_rule(
    rule: str, beginnings: Iterable[str] = (), features: Iterable[str] = ()
) -> tuple[str, str, str | None]:
    """Split a rule into metric, feature and value.

    Without a slice, the feature is empty and the value is None. Names may contain the separators,
    so the longest match among the `beginnings` of metrics and among the `features` is used.
    """
    begun = max((each for each in beginnings if rule.startswith(each)), key=len, default="")
    rest, _, part = rule[len(begun) :].partition("@")
    known = [each for each in features if part == each or part.startswith(f"{each}=")]
    feature = max(known, key=len, default=part.partition("=")[0])
    value = part[len(feature) + 1 :] if len(part) > len(feature) else None
    return begun + rest, feature, value


def present_name(metric: str, known: Iterable[str]) -> str:
    """Return a hint with the current name of a renamed metric, or the closest known name."""
    for old, names in _RENAMED.items():
        begin = metric.removesuffix(old)
        if now := [begin + name for name in names if begin != metric and begin + name in known]:
            return f"; it is now called {now[0]!r}"
    for short, name in _SHORT.items():
        if metric.endswith(short) and (meant := metric.removesuffix(short) + name) in known:
            return f"; did you mean {meant!r}?"
    return nearest(metric, known)


class ChampionRule(Section):
    """A limit on how much worse than the champion a model may be on the same examples."""

    metric: str = key("", "metric to compare; empty: the main metric of the task")
    margin: float | str = key(
        "5%",
        "non-inferiority margin: the largest accepted decline, in units of the metric or as a "
        "share of the champion's gain over a constant prediction; below 0: a required improvement",
    )
    confidence: float = key(
        0.995, "confidence level of the test that the decline is within the margin", ge=0.5, lt=1
    )
    class_margin: float | str = key(
        "50%",
        "largest accepted drop in the recall of a class, as a number or as a share of the "
        "champion's recall; 100%: no limit",
    )
    better: Literal["", "higher", "lower"] = key(
        "",
        "whether higher or lower values of a custom metric are better; empty: as the task declares",
    )

    @field_validator("margin", "class_margin", mode="before")
    @classmethod
    def _number_or_share(cls, margin: Any) -> Any:
        if isinstance(margin, str):
            digits, sign, rest = margin.strip().partition("%")
            with suppress(ValueError):
                number = float(digits)
                if math.isfinite(number) and not rest:
                    return margin.strip() if sign else number
        elif type(margin) in {int, float} and math.isfinite(margin):
            return margin
        raise ValueError("write a number such as 0.02, or a share such as 2%")

    def comparison_key(self) -> str:
        """Return the parameters that affect evaluations, which an absolute margin does not."""
        return f"{self.metric} {self.better} {self.confidence!r} {self.share!r} {self.class_margin}"

    @property
    def share(self) -> float:
        """The share of the champion's gain that may be lost, or 0 if the margin is absolute."""
        return _share(self.margin) if isinstance(self.margin, str) else 0.0

    def compute_margin(self, gain: float) -> float:
        """Return the margin in units of the metric, given the gain of the champion."""
        return self.margin if not isinstance(self.margin, str) else self.share * max(gain, 0.0)

    def compute_class_margins(self, recalls: Any) -> Any:
        """Return the allowed drop in recall of each class, from an array of champion recalls."""
        if isinstance(self.class_margin, str):
            return _share(self.class_margin) * recalls
        return self.class_margin + 0 * recalls


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / 100


_OLD_KEYS = "write champion: {margin: 0.02, confidence: 0.95} (a negative margin requires a gain)"


class GateConfig(Section):
    """The thresholds that a model has to reach before it is exported.

    A bound applies to a metric of all examples (`accuracy`), to each part of a slice
    (`accuracy@label`), or to one part (`accuracy@label=7`).
    """

    min: dict[str, float] = key({}, "minimum value of each metric, such as {accuracy: 0.9}")
    max: dict[str, float] = key({}, "maximum value of each metric, such as {loss: 0.5}")
    constant: Literal["required", "reported"] = key(
        "required",
        "required: refuse a model that is not better than the best constant prediction; reported: "
        "only report it",
    )
    champion: ChampionRule = Field(ChampionRule())

    @model_validator(mode="before")
    @classmethod
    def _convert_old(cls, tree: Any) -> Any:
        if isinstance(tree, dict):
            old = [name for name in ("min_gain", "significance") if name in tree]
            if old or isinstance(tree.get("champion"), str):
                name = old[0] if old else "champion"
                raise ValueError(f"{name}: the gate now compares with a margin; {_OLD_KEYS}")
        return tree

    @field_validator("min", "max")
    @classmethod
    def _well_formed(cls, rules: dict[str, float]) -> dict[str, float]:
        for rule, value in rules.items():
            metric, feature, _ = split_rule(rule)
            if not _METRIC.fullmatch(metric):
                raise ValueError(
                    f"{rule!r} does not begin with a metric; write accuracy or accuracy@label"
                )
            if "@" in rule and not feature:
                raise ValueError(f"{rule!r} has no slice; write {metric}@feature=value")
            if metric.endswith(SHARES) and not 0 <= value <= 1:
                raise ValueError(f"{metric} is a share: {value:g} is not between 0 and 1")
        return rules
