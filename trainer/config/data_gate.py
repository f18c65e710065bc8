"""The key `data.gate`: which rules reject a dataset or warn about it, and their limits."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from flotilla.trainer.config.base import Whole, key
from flotilla.trainer.runtime.errors import nearest

REFUSE, WARN, OFF = "refuse", "warn", "off"
ACTIONS = (REFUSE, WARN, OFF)
#: The key in `rules` for all rules that are not listed there.
ALL = "all"
RULES = {
    "missing_feature": (
        REFUSE,
        "a missing feature that the schema file requires or the champion's dataset has",
    ),
    "new_feature": (WARN, "a feature that the champion's dataset does not have"),
    "type": (
        REFUSE,
        "a feature with another type than in the schema file, or another type or shape than in "
        "the champion's dataset",
    ),
    "schema": (
        REFUSE,
        "a value, or a share of missing values, that the schema file does not allow",
    ),
    "empty": (
        REFUSE,
        "a training or test split without examples, or a feature without values in one of them",
    ),
    "size": (WARN, "far fewer examples than in the champion's dataset"),
    "range": (WARN, "numbers outside the range of the champion's dataset"),
    "unit": (REFUSE, "numbers in another unit than in the champion's dataset"),
    "missing_values": (WARN, "more missing values than in the champion's dataset"),
    "constant": (WARN, "a feature with the same value in all training examples"),
    "new_values": (WARN, "categories that the champion's dataset does not have"),
    "new_class": (WARN, "a class of a label that the champion's dataset does not have"),
    "class_gone": (
        REFUSE,
        "a class of a label that is missing from a split, or is the only class in it",
    ),
    "balance": (WARN, "a label whose class shares differ from those in the champion's dataset"),
    "imbalance": (WARN, "a class that is too rare to affect accuracy noticeably"),
    "duplicates": (WARN, "more examples with the same inputs within a split than expected"),
    "leakage": (REFUSE, "more examples that occur in two splits than expected by chance"),
    "label_leakage": (
        WARN,
        "an input that alone determines a label",
    ),
    "association": (
        REFUSE,
        "a label that depends far less on the inputs than in the champion's dataset, or far less "
        "in the test split than in training",
    ),
    "drift": (WARN, "a feature with another distribution than in the champion's dataset"),
    "drift_together": (
        WARN,
        "small drifts of many numeric features that chance does not explain",
    ),
    "splits_differ": (
        WARN,
        "a feature with another distribution in the test split than in training",
    ),
}
#: Each limit with its default, minimum, maximum and meaning.
LIMITS = {
    "size": (0.5, 0.0, 1.0, "minimum number of examples, as a share of the number in the "
    "champion's dataset"),
    "missing_values": (0.05, 0.0, 1.0, "maximum increase in the share of missing values"),
    "range": (0.002, 0.0, 1.0, "maximum share of values below the champion's range, or above it"),
    "new_values": (0.005, 0.0, 1.0, "maximum share of examples with a new value, in excess of the "
    "share expected by chance"),
    "balance": (0.05, 0.0, 1.0, "maximum total variation distance between the class shares"),
    "imbalance": (0.1, 0.0, 1.0, "minimum size of a class, relative to its size if all classes "
    "were equally large"),
    "duplicates": (0.01, 0.0, 1.0, "maximum share of duplicates within a split, in excess of the "
    "expected share"),
    "leakage": (0.005, 0.0, 1.0, "maximum share of a split's examples that are also in another "
    "split, in excess of the share expected by chance"),
    "label_leakage": (0.995, 0.5, 1.0, "minimum accuracy of predicting a class from the input, "
    "with all classes weighted equally; for a number, 1 minus the maximum relative error"),
    "drift": (0.1, 0.0, 1.0, "minimum distance between two distributions that is reported: "
    "Kolmogorov-Smirnov for numbers, total variation for categories"),
    "drift_together": (0.015, 0.0, 1.0, "minimum root mean square of P(new > old) - 1/2, over the "
    "numeric features, that is reported"),
    "significance": (0.0002, 1e-12, 0.1, "significance level of each rule for one dataset: a "
    "difference is reported only if its p-value is smaller"),
}  # fmt: skip


class DataGateConfig(Whole):
    """The data gate: the action of each rule, and the limits."""

    rules: dict[str, Literal["refuse", "warn", "off"]] = key(
        {},
        f"action of each rule: {{rule: refuse | warn | off}}; the name {ALL} stands for every rule "
        "that is not listed",
    )
    limits: dict[str, float] = key({}, "limits that differ from the defaults: {limit: value}")

    @field_validator("rules", mode="before")
    @classmethod
    def _words_of_yaml(cls, value: Any) -> Any:
        # YAML reads an unquoted `off` as false.
        if isinstance(value, dict):
            return {name: OFF if word is False else word for name, word in value.items()}
        return value

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, rules: dict[str, str]) -> dict[str, str]:
        for name in rules:
            if name != ALL and name not in RULES:
                hint = nearest(name, RULES) or f" (one of {', '.join(RULES)})"
                raise ValueError(f"{name!r} is not a rule{hint}")
        return rules

    @field_validator("limits")
    @classmethod
    def _check_limits(cls, limits: dict[str, float]) -> dict[str, float]:
        for name, value in limits.items():
            if name not in LIMITS:
                hint = nearest(name, LIMITS) or f" (one of {', '.join(LIMITS)})"
                raise ValueError(f"{name!r} is not a limit{hint}")
            _, least, most, _ = LIMITS[name]
            if not least <= value <= most:
                raise ValueError(f"{name}: {value:g} is not between {least:g} and {most:g}")
        return limits

    def action(self, rule: str) -> str:
        """Return the action of a rule: refuse, warn or off."""
        return self.rules.get(rule) or self.rules.get(ALL) or RULES[rule][0]

    def limit(self, name: str) -> float:
        """Return the value of a limit."""
        return self.limits.get(name, LIMITS[name][0])
