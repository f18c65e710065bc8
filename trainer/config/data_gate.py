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
#: Each rule with its default action and meaning. The default is to refuse data from which no model
#: can learn or that make a metric wrong, and to warn about findings that a person has to judge.
RULES = {
    "missing_feature": (REFUSE, "a feature of the schema or of the champion's dataset is missing"),
    "new_feature": (WARN, "a feature that the champion's dataset does not have"),
    "type": (REFUSE, "a feature has an unexpected type or shape"),
    "schema": (REFUSE, "a value that the schema file does not allow"),
    "empty": (REFUSE, "a split without examples, or a feature without values"),
    "size": (WARN, "far fewer examples than the champion's dataset"),
    "range": (WARN, "values outside the range of the champion's dataset"),
    "unit": (REFUSE, "all values are in another unit than in the champion's dataset"),
    "missing_values": (WARN, "more missing values than in the champion's dataset"),
    "constant": (WARN, "a feature has the same value in all examples"),
    "new_values": (WARN, "categories that the champion's dataset does not have"),
    "new_class": (WARN, "a class of a label that the champion's dataset does not have"),
    "class_gone": (REFUSE, "a class of a label without examples in a split that had some"),
    "balance": (WARN, "the class shares of a label have changed"),
    "imbalance": (WARN, "a class that is too rare for accuracy to measure"),
    "duplicates": (WARN, "an example occurs several times in one split"),
    "leakage": (REFUSE, "examples occur in two splits"),
    "label_leakage": (
        WARN,
        "a feature that determines the label by its values, a threshold or an order",
    ),
    "association": (
        REFUSE,
        "features predict the label far worse than before, or worse in test than in training",
    ),
    "drift": (WARN, "the distribution of a feature has changed"),
    "drift_together": (WARN, "the distributions of many features have changed a little"),
    "splits_differ": (
        WARN,
        "the distribution of a feature differs between the test split and training",
    ),
}
#: Each limit with its default, minimum, maximum and meaning.
LIMITS = {
    "size": (0.5, 0.0, 1.0, "minimum number of examples, as a share of the champion's dataset"),
    "missing_values": (0.05, 0.0, 1.0, "largest increase of the share of missing values"),
    "range": (0.002, 0.0, 1.0, "largest share of values outside the champion's range"),
    "new_values": (0.005, 0.0, 1.0, "largest share of examples with a new value"),
    "balance": (0.05, 0.0, 1.0, "largest change of the class shares, as a share of the examples"),
    "imbalance": (0.1, 0.0, 1.0, "smallest share of a class, relative to classes of equal size"),
    "duplicates": (0.01, 0.0, 1.0, "largest share of duplicates within a split"),
    "leakage": (0.005, 0.0, 1.0, "largest share of a split's examples that another split has"),
    "label_leakage": (0.995, 0.5, 1.0, "smallest share of the examples (or of the label's "
                      "variance) that a feature must predict to be reported"),
    "drift": (0.1, 0.0, 1.0, "largest distance of two distributions: Kolmogorov-Smirnov for "
              "numbers, total variation for categories"),
    "drift_together": (0.015, 0.0, 1.0, "largest root mean square of P(new > old) - 1/2 over the "
                       "features"),
    "significance": (0.0002, 1e-12, 0.1, "significance level by rule and dataset: a change that is "
                     "less probable by chance is reported"),
}  # fmt: skip


class DataGateConfig(Whole):
    """The data gate: the action of each rule, and the limits."""

    rules: dict[str, Literal["refuse", "warn", "off"]] = key(
        {},
        f"action of each rule: {{rule: refuse | warn | off}}; {ALL} for rules that are not named",
    )
    limits: dict[str, float] = key({}, "limits by name that differ from the default")

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
