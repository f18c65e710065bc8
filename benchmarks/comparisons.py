"""Comparisons with a bound, most of them ratios of two values that are measured alternately."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

VERSIONS = ("tensorflow", "keras", "numpy", "google-cloud-storage", "boto3")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured ratio or rate and its bound.

    `rounds` has the value of each round. The median must satisfy either `at_least` or `at_most`.
    With `at_least`, the worst round may have a bound too (`worst_at_least`). `more` holds further
    values for the report.
    """

    name: str
    rounds: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None
    worst_at_least: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject a comparison without rounds, and invalid combinations of bounds."""
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"{self.name}: it needs either at_least or at_most")
        if self.worst_at_least is not None and self.at_least is None:
            raise ValueError(f"{self.name}: worst_at_least needs at_least")
        if not self.rounds:
            raise ValueError(f"{self.name}: it has no rounds")

    @property
    def ratio(self) -> float:
        """The median of all rounds."""
        return median(self.rounds)

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds by name, starting with the bound of the median."""
        found = {
            "at_least": self.at_least,
            "at_most": self.at_most,
            "worst_at_least": self.worst_at_least,
        }
        return {name: value for name, value in found.items() if value is not None}

    @property
    def holds(self) -> bool:
        """Whether the median, and the worst round if it has a bound, are within their bounds."""
        if self.at_least is not None:
            worst = -math.inf if self.worst_at_least is None else self.worst_at_least
            return self.ratio >= self.at_least and all(each >= worst for each in self.rounds)
        return self.at_most is not None and self.ratio <= self.at_most

    def tree(self) -> dict[str, Any]:
        """Return the entry of this comparison in `bench.json`."""
        return {
            "name": self.name,
            "ratio": round(self.ratio, 4),
            **self.bounds,
            "holds": self.holds,
            "rounds": [round(each, 4) for each in self.rounds],
            **self.more,
        }


Measured = TypeVar("Measured")


def alternating(
    rounds: int, first: Callable[[], Measured], second: Callable[[], Measured]
) -> list[tuple[Measured, Measured]]:
    """Return both values of every round. The order of measurement alternates."""
    found = []
    for number in range(rounds):
        if number % 2:
            later, earlier = second(), first()
            found.append((earlier, later))
        else:
            found.append((first(), second()))
    return found


def write(compared: list[Comparison], path: Path) -> None:
    """Write all comparisons as JSON, with the machine, its load and the versions of packages."""
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load": [round(each, 2) for each in os.getloadavg()],
    }
    tree = {
        "machine": machine,
        "versions": {name: version(name) for name in VERSIONS},
        "comparisons": [each.tree() for each in compared],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def table(compared: list[Comparison]) -> str:
    """Return a table with one line per comparison."""
    rows = [("comparison", "ratio", "limit", "met")]
    rows += [
        (each.name, f"{each.ratio:.3f}", _words(each), str(each.holds).lower()) for each in compared
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def _words(comparison: Comparison) -> str:
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}" for name, value in comparison.bounds.items()
    )
