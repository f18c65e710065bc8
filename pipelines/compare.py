"""`flotilla compare RUN RUN...`: runs side by side, with what tells their configurations apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from components import gather_report
from pipelines.cli.commands import print_json
from pipelines.cli.display import Terminal
from pipelines.runs.local import check_run_id
from trainer import storage
from trainer.errors import DONE, ConfigError
from trainer.report.report import figure

_FEWEST = 2
_COURSE = ("global_step", "loss", "validation_loss", "steps_per_second", "seconds")


def compare(runs: list[str], workdir: Path, *, as_json: bool) -> int:
    """Show verdict, figures, course and differing settings of runs below `workdir`.

    Raises:
        ConfigError: there are fewer than two runs, or one is not there.
    """
    if len(runs) < _FEWEST:
        raise ConfigError("name two runs or more to compare")
    for run in runs:
        check_run_id(workdir, run)
    facts = [_facts(workdir, run) for run in runs]
    found = {
        "verdict": {"verdict": [each["verdict"] for each in facts]},
        "test": _rows([each["metrics"] for each in facts]),
        "training": _rows([_course(each) for each in facts]),
        "cost": _rows([each["cost"] for each in facts]),
        "settings": _differing([_flat(each["config"]) for each in facts]),
    }
    Terminal().print(_table(runs, found))
    if as_json:
        print_json({"status": "done", "runs": runs, "comparison": found})
    return DONE


def _facts(workdir: Path, run: str) -> dict[str, Any]:
    folder = workdir.absolute() / run
    found = gather_report.gathered("", storage.uri_of(workdir.absolute()), run, folder)
    root = (found["config"].get("storage") or {}).get("root")
    return gather_report.gathered("", root, run, folder) if root else found


def _course(facts: dict[str, Any]) -> dict[str, Any]:
    last = facts["history"][-1] if facts["history"] else {}
    return {name: last[name] for name in _COURSE if name in last}


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


def _table(runs: list[str], found: dict[str, dict[str, list[Any]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(run, justify="right", overflow="fold")
    for group, rows in found.items():
        # Loss is measured in training and on the test split.
        before = f"{group}: " if group in ("test", "training") else ""
        for name, row in rows.items():
            table.add_row(escape(f"{before}{name}"), *(escape(figure(each)) for each in row))
        table.add_section()
    return table
