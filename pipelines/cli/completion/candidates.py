"""Candidates for the completion of a command line: runs, models, versions and steps.

Completion reads only local files and never fails. It skips unreadable records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import typer

Found = list[tuple[str, str]]
Given = ParamSpec("Given")
_RUNS = "runs"
# Shells insert a candidate without quoting it, and zsh evaluates it, so a name that another user
# chose must not contain commands.
_PLAIN = re.compile(r"[\w@%+=:,./][\w@%+=:,./-]*")


def never_fail(complete: Callable[Given, Found]) -> Callable[Given, Found]:
    """Wrap a completion function so that it offers nothing instead of raising an error."""

    @wraps(complete)
    def called(*given: Given.args, **named: Given.kwargs) -> Found:
        try:
            return complete(*given, **named)
        # Return nothing, because a traceback would be printed into the user's command line.
        except Exception:
            return []

    return called


@never_fail
def complete_runs(context: typer.Context) -> Found:
    """Offer the runs below --workdir, newest first, except those already on the command line."""
    from flotilla.pipelines.runs.local_status import run_ids

    named = context.params.get("runs") or ()
    return _offer(run for run in run_ids(_workdir(context)) if run not in named)


@never_fail
def complete_sweeps(context: typer.Context) -> Found:
    """Offer the sweeps below --workdir, newest first."""
    from flotilla.trainer.sweeps.study import FILE

    found = _workdir(context).glob(f"*/{FILE}")
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    return _offer(path.parent.name for path in newest)


@never_fail
def complete_models(context: typer.Context) -> Found:
    """Offer the registered models."""
    from flotilla.trainer.promotion import registry

    return _offer(registry.names(_root(context)))


@never_fail
def complete_versions(context: typer.Context) -> Found:
    """Offer the versions of the model on the command line, newest first."""
    return _versions(context, str(context.params["name"]))


@never_fail
def complete_model_versions(context: typer.Context, incomplete: str) -> Found:
    """Offer the registered models, or the versions of a model after `NAME@`."""
    name, at, _ = incomplete.partition("@")
    if not at:
        return complete_models(context)
    return [(f"{name}@{number}", text) for number, text in _versions(context, name)]


@never_fail
def complete_steps() -> Found:
    """Offer the steps of a pipeline and their stages."""
    from flotilla.components.table import STEPS

    rows = [row for row in STEPS if not row.is_exit_step]
    found = {row.name: "a step" for row in rows}
    for row in rows:
        for stage in row.stages:
            found.setdefault(stage.name, f"a stage of {row.name}")
    return [*found.items()]


@never_fail
def complete_examples() -> Found:
    """Offer the example configurations."""
    from flotilla.pipelines.configs import list_examples

    return [(each.name, each.description) for each in list_examples()]


def _offer(names: Iterable[str]) -> Found:
    return [(name, "") for name in names if _PLAIN.fullmatch(name)]


def _versions(context: typer.Context, name: str) -> Found:
    from flotilla.trainer.promotion import registry

    root = _root(context)
    champion = max(registry.promotions(root, name), key=lambda each: each.number, default=None)
    numbers = [each.number for each in registry.versions(root, name)]
    is_champion = champion.version if champion else 0
    return [
        (str(number), "the champion" if number == is_champion else "")
        for number in sorted(numbers, reverse=True)
    ]


def _workdir(context: typer.Context) -> Path:
    return Path(context.params.get("workdir") or _RUNS)


def _root(context: typer.Context) -> str:
    from flotilla.pipelines.models import choose_root
    from flotilla.trainer import storage

    given: Any = context.params.get("root")
    root = choose_root(given or "", _workdir(context))
    if storage.local_path(root) is None:
        raise ValueError(root)
    return root
