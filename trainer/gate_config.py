"""The policy of the gate: bounds by metric, and what a model has to be beside the champion."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from trainer.errors import nearest
from trainer.section import Section

# What an evaluation measures; `tests/trainer/test_evaluate.py` holds it against what is measured.
METRICS = (
    "loss", "accuracy", "top_3_accuracy", "macro_precision", "macro_recall", "macro_f1",
    "weighted_precision", "weighted_recall", "weighted_f1", "roc_auc", "pr_auc",
    "calibration_error",
)  # fmt: skip
METRICS_OF_SLICES = METRICS[:9]
SHARES = ("accuracy", "precision", "recall", "f1", "auc", "calibration_error")


class GateConfig(Section):
    """What a model has to reach before it is exported.

    A bound is for a metric of all examples (`accuracy`), of each part of a slice
    (`accuracy@label`), or of one part (`accuracy@label=7`).
    """

    min: dict[str, float] = Field(
        {"accuracy": 0.95}, description=f"lowest value by metric: {', '.join(METRICS)}"
    )
    max: dict[str, float] = Field({}, description="highest value by metric, likewise")
    champion: Literal["not_worse", "better"] = Field(
        "not_worse", description="what a model has to be beside the champion"
    )
    min_gain: float = Field(
        0.0, ge=0, le=1, description="gain of accuracy, where better is asked for"
    )
    significance: float = Field(
        0.05, gt=0, lt=1, description="probability at which a difference is taken to be real"
    )

    @field_validator("min", "max")
    @classmethod
    def _known_metrics(cls, rules: dict[str, float]) -> dict[str, float]:
        for rule, value in rules.items():
            metric, sliced, part = rule.partition("@")
            allowed = METRICS_OF_SLICES if sliced else METRICS
            if metric not in allowed:
                hint = nearest(metric, allowed) or f" (one of {', '.join(allowed)})"
                raise ValueError(f"no metric {metric!r}{' of a slice' if sliced else ''}{hint}")
            if sliced and not part.partition("=")[0]:
                raise ValueError(f"{rule!r} names no slice: write {metric}@feature=value")
            if metric.endswith(SHARES) and not 0 <= value <= 1:
                raise ValueError(f"{metric} is a share: {value:g} is not between 0 and 1")
        return rules
