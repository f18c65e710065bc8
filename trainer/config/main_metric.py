"""The main metric of a run: validations, trials and models are compared by it.

Whatever is written down says it by two fields: `main_metric`, and `directions`, which says of each
metric whether a higher or a lower value is better. Readers take it from there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flotilla.trainer.runtime.json_records import is_number

LOSS = "loss"
#: What the names of the metrics of a validation begin with in a row.
VALIDATION = "validation_"
VALIDATION_LOSS = f"{VALIDATION}{LOSS}"
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class MainMetric:
    """A metric, and whether `higher` or `lower` is better; the loss where nothing is said."""

    name: str = LOSS
    better: str = "lower"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> MainMetric:
        """Return that of what was written down.

        An evaluation or a model of before it was said is a classifier's, whose accuracy comes after
        its loss; of before directions were, the name says which value is better.
        """
        others = (name for name in said.get("metrics") or {} if name != LOSS)
        name = str(said.get("main_metric") or next(others, LOSS))
        directions = said.get("directions")
        known = directions.get(name) if isinstance(directions, Mapping) else None
        guess = "lower" if name.endswith((LOSS, "error")) else "higher"
        return cls(name=name, better=known if known in ("higher", "lower") else guess)

    @property
    def column(self) -> str:
        """Its name in the row of a validation."""
        return f"{VALIDATION}{self.name}"

    def rank(self, value: float) -> float:
        """Return a number that is lower for a better value."""
        return value if self.better == "lower" else -value

    def order(self, validation: Mapping[str, Any]) -> tuple[bool, float, float]:
        """Return a key that sorts rows of validations, the best first.

        Equal ones go by their loss, and so do those that do not measure it, after all others.
        """
        value, loss = (_number(validation, name) for name in (self.column, VALIDATION_LOSS))
        rank = math.inf if value is None else self.rank(value)
        return value is None, rank, math.inf if loss is None else loss


#: Of what was written before the main metric was, and where a validation does not measure it.
BY_LOSS = MainMetric()


def main_first(metrics: Mapping[str, _Value], name: str) -> dict[str, _Value]:
    """Return metrics in the order in which they are shown: the main one, the loss, all others."""
    first = {each: metrics[each] for each in (name, LOSS) if each in metrics}
    return {**first, **metrics}


def _number(row: Mapping[str, Any], name: str) -> float | None:
    return row[name] if is_number(row.get(name)) else None
