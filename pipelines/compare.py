"""Compares runs: their results, and the settings in which they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.components.records import gather_report
from flotilla.pipelines import notebook
from flotilla.pipelines.runs.local import check_run_id
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import BY_LOSS, MainMetric, main_first
from flotilla.trainer.report import headline
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.json_records import is_number

_FEWEST = 2
_PROGRESS = ("loss", "validation_loss", "steps_per_second", "seconds")


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """The results and settings of several runs, side by side.

    Attributes:
        groups: for each group and name, the value of every run; None for a run without a value.
        best: the runs with the best value of the main metric; empty if their main metrics differ.
        intervals: for each metric of the group `test`, each run's confidence interval or None.
    """

    runs: tuple[str, ...]
    groups: Mapping[str, Mapping[str, list[Any]]]
    main_metric: str = ""
    best: tuple[str, ...] = ()
    intervals: Mapping[str, list[Any]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the names of the runs and of the best runs."""
        best = f"best {', '.join(self.best)}" if self.best else ""
        return notebook.short("Comparison", ", ".join(self.runs), best)

    def _repr_html_(self) -> str:
        rows = (
            [f"{group}: {name}", *row]
            for group, of in self.groups.items()
            for name, row in of.items()
        )
        best = f", best by {self.main_metric}: {', '.join(self.best)}" if self.best else ""
        return notebook.table(f"{len(self.runs)} runs{best}", ("", *self.runs), rows)


def compare(runs: Sequence[str | RunResult], workdir: str | Path = "runs") -> Comparison:
    """Compare the verdicts, metrics, progress, costs and settings of runs. Raises `ConfigError`.

    Example:
        slow, fast = (flotilla.run(training={"steps": steps}) for steps in (2000, 200))
        flotilla.compare([slow, fast]).best
    """
    named = (each if isinstance(each, str) else each.run_id for each in runs)
    return _build_comparison(tuple(dict.fromkeys(named)), Path(workdir))


def _build_comparison(runs: tuple[str, ...], workdir: Path) -> Comparison:
    if len(runs) < _FEWEST:
        raise ConfigError("compare needs at least two different runs; add a run")
    for run in runs:
        check_run_id(workdir, run)
    facts = [_facts(workdir, run) for run in runs]
    mains = dict.fromkeys(MainMetric.of(e) for each in facts if (e := each["evaluation"]))
    main = next(iter(mains), BY_LOSS)
    test = _rows([main_first(each["metrics"], main.name) for each in facts])
    values = test.get(main.name, []) if len(mains) == 1 else []
    known = [headline.opponents(each["evaluation"]) for each in facts]
    others = [{name: each.get(main.name) for name, each in of.items()} for of in known]
    groups = {
        "verdict": {"verdict": [each["verdict"] for each in facts]},
        "test": test,
        "next to it": {name: row for name, row in _rows(others).items() if name != "champion"},
        "training": _rows([_progress(each, main) for each in facts]),
        "cost": _rows([each["cost"] for each in facts]),
        "settings": _differing([_flat(each["config"]) for each in facts]),
    }
    ranks = [main.rank(value) if is_number(value) else math.inf for value in values]
    return Comparison(
        runs=runs,
        groups=groups,
        main_metric=main.name if values else "",
        best=tuple(
            run for run, rank in zip(runs, ranks, strict=False) if rank == min(ranks) < math.inf
        ),
        intervals=_rows([each["evaluation"].get("intervals") or {} for each in facts]),
    )


def _facts(workdir: Path, run: str) -> dict[str, Any]:
    folder = workdir.absolute() / run
    found = gather_report.gather_facts("", storage.uri_of(workdir), run, folder)
    root = (found["config"].get("storage") or {}).get("root")
    return gather_report.gather_facts("", root, run, folder) if root else found


def _progress(facts: dict[str, Any], main: MainMetric) -> dict[str, Any]:
    last = facts["history"][-1] if facts["history"] else {}
    names = dict.fromkeys(("global_step", main.column, *_PROGRESS))
    return {name: last[name] for name in names if name in last}


def _rows(columns: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for column in columns for name in column))
    return {name: [column.get(name) for column in columns] for name in names}


def _differing(columns: list[dict[str, Any]]) -> dict[str, list[Any]]:
    rows = _rows(columns)
    return {name: row for name, row in rows.items() if any(each != row[0] for each in row)}


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found
