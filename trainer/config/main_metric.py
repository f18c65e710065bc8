"""The main metric of a run, by which validations, trials and models are compared.

Records contain it in two fields: `main_metric`, and `directions`, which states for each metric
whether a higher or a lower value is better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from flotilla.trainer.runtime.json_records import is_number

LOSS = "loss"
VALIDATION = "validation_"
VALIDATION_LOSS = f"{VALIDATION}{LOSS}"
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class MainMetric:
    """A metric, and whether a `higher` or `lower` value is better. The default is the loss."""

    name: str = LOSS
    better: str = "lower"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> MainMetric:
        """Return the main metric of a record.

        A record of an earlier version without `main_metric` belongs to a classifier, whose metrics
        list the accuracy after the loss. Without `directions`, the better direction is guessed from
        the name.
        """
        others = (name for name in said.get("metrics") or {} if name != LOSS)
        name = str(said.get("main_metric") or next(others, LOSS))
        directions = said.get("directions")
        known = directions.get(name) if isinstance(directions, Mapping) else None
        guess = "lower" if name.endswith((LOSS, "error")) else "higher"
        return cls(name=name, better=known if known in ("higher", "lower") else guess)

    @property
    def column(self) -> str:
        """The name of the metric in a validation row."""
        return f"{VALIDATION}{self.name}"

    def rank(self, value: float) -> float:
        """Return a number that is lower for a better value."""
        return value if self.better == "lower" else -value

    def order(self, validation: Mapping[str, Any]) -> tuple[bool, float, float]:
        """Return a key that sorts validation rows, the best first.

        The loss breaks ties. Rows without this metric come last, and are also sorted by their loss.
        """
        value, loss = (_number(validation, name) for name in (self.column, VALIDATION_LOSS))
        rank = math.inf if value is None else self.rank(value)
        return value is None, rank, math.inf if loss is None else loss


#: The main metric of records of earlier versions, and of validations that measure only the loss.
BY_LOSS = MainMetric()


def main_first(metrics: Mapping[str, _Value], name: str) -> dict[str, _Value]:
    """Sort metrics for display: the main metric, the loss, then the others."""
    first = {each: metrics[each] for each in (name, LOSS) if each in metrics}
    return {**first, **metrics}


def _number(row: Mapping[str, Any], name: str) -> float | None:
    return row[name] if is_number(row.get(name)) else None
