"""Totals over many runs, and counts by kind of fault and by strategy."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.chaos.invariants import (
    TOTALS,
    Outcome,
    Violation,
    attempts,
    is_exact,
    repeated,
    restarts,
)
from tests.chaos.plan import Plan

COUNTED = ("runs", "blessed", "exact steps", "tries resumed", "failed in one line", "broken")
OF_ALL = ("faults", "missed", "attempts", "restarts", "steps repeated")


class Tally:
    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._rows: dict[str, Counter[str]] = {}

    def add(self, plan: Plan, found: Outcome, violations: Sequence[Violation]) -> None:
        broken = Counter(violation.total for violation in violations)
        counts = Counter({
            "runs": 1,
            "blessed": int(found.ends[-1][0] == 0),
            "exact steps": int(is_exact(found)),
            "tries resumed": len(found.ends) - 1,
            "failed in one line": sum(code == 1 and bool(words) for code, words in found.ends),
            "broken": len(violations),
        })  # fmt: skip
        self._all += counts + broken
        self._all += Counter({
            "faults": len(found.struck),
            "missed": len(plan.faults) - len(found.struck),
            "attempts": attempts(found),
            "restarts": restarts(found),
            "steps repeated": repeated(found),
        })  # fmt: skip
        for name in [plan.strategy, *sorted(set(found.struck))]:
            self._rows[name] = self._rows.get(name, Counter()) + counts

    @property
    def is_violated(self) -> bool:
        return any(self._all[total] for total in TOTALS)

    def table(self) -> str:
        """Return one row per strategy and one per kind of injected fault."""
        width = max(map(len, self._rows), default=0)
        titles = [" " * width, *COUNTED]
        rows = [
            [name.ljust(width), *(str(counts[each]).rjust(len(each)) for each in COUNTED)]
            for name, counts in sorted(self._rows.items())
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in [titles, *rows])

    def __str__(self) -> str:
        return _listed(self._all, (*COUNTED[:-1], *OF_ALL, *TOTALS))


def _listed(counts: Counter[str], names: Iterable[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in names)
