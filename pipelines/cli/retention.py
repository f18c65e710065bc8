"""`flotilla gc`, which removes files of interrupted writes and, on request, old data."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.pipelines.cli.exit import Answer, answers, failure, output
from flotilla.pipelines.cli.options import Assignments, Config, Workdir
from flotilla.pipelines.cli.run import RUNS
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.output.streams import say

if TYPE_CHECKING:
    from pathlib import Path

    from flotilla.pipelines.retention.plan import Item, Plan, Policy

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000
KeepRuns = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Keep runs that were active within this time, such as 30d. Remove older runs, "
        "datasets, checkpoints and code, unless a kept run or version needs them.",
    ),
]
KeepVersions = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Keep the newest N versions of each model, the champion, and the versions that a "
        "rollback or the gate needs. Remove the others.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="List what --keep-runs and --keep-versions would remove, and remove nothing.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Remove without asking for confirmation.")]


@answers
def gc(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = RUNS,
    keep_runs: KeepRuns = "",
    keep_versions: KeepVersions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> Answer:
    """Remove files left by interrupted writes and, on request, old runs and versions."""
    from flotilla.pipelines.retention.plan import policy
    from flotilla.pipelines.retention.removal import collect, require_clock
    from flotilla.pipelines.runs.local import configuration, find_root

    wanted = policy(keep_runs, keep_versions)
    is_asked = wanted.runs is not None or wanted.versions is not None
    if dry_run and not is_asked:
        raise ConfigError(
            "--dry-run needs --keep-runs or --keep-versions; add at least one of the two options"
        )
    root = find_root(configuration(config, assignments or ()), workdir)
    if not dry_run:
        require_clock(root)
    answer = (
        _apply_retention(root, workdir, wanted, dry_run=dry_run, yes=yes) if is_asked else Answer()
    )
    if answer.code or dry_run:
        return answer
    removed = collect(root)
    for uri in removed:
        say(f"removed {uri}")
    say(f"{len(removed)} leftover files removed below {root}")
    return Answer(more={**answer.more, "removed": [*answer.more.get("removed", ()), *removed]})


def _apply_retention(
    root: str, workdir: Path, wanted: Policy, *, dry_run: bool, yes: bool
) -> Answer:
    from datetime import UTC, datetime

    from flotilla.pipelines.retention.inventory import read
    from flotilla.pipelines.retention.plan import make_plan
    from flotilla.pipelines.retention.removal import remove
    from flotilla.trainer import storage

    plan = make_plan(read(root, workdir), wanted, datetime.now(UTC))
    for remark in plan.remarks:
        say(remark)
    uris = {each.path: storage.join(root, *each.path.split("/")) for each in plan.going}
    _show(plan, root)
    rows = [_row(each, uris[each.path]) for each in plan.going]
    facts = {"planned": rows, "bytes": plan.bytes, "kept": list(plan.remarks)}
    if dry_run or not plan.going:
        return Answer(more={**facts, "removed": []})
    if not yes:
        _ask(plan)
    removed: list[str] = []

    def done(item: Item) -> None:
        removed.append(uris[item.path])
        say(f"removed {uris[item.path]}")

    try:
        for item in remove(root, workdir, plan, wanted, done):
            say(
                f"skipped {item.path}: it is in use, it is needed by an item that is kept, or it "
                "has already been removed"
            )
    except UserError as error:
        say(f"flotilla: {error}; {len(removed)} of {len(rows)} items were removed; try again")
        failed = failure(str(error), error.exit_code)
        return Answer(
            status=failed.status,
            code=failed.code,
            message=failed.message,
            more={**facts, "removed": removed},
        )
    return Answer(more={**facts, "removed": removed})


def _ask(plan: Plan) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("nothing was removed: there is no terminal to confirm on; add --yes")
    try:
        agreed = typer.confirm(f"Remove these {len(plan.going)} items?", err=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        raise ConfigError("nothing was removed")


def _show(plan: Plan, root: str) -> None:
    from flotilla.pipelines.cli.display import Terminal
    from flotilla.pipelines.cli.tables import Table

    if not plan.going:
        say(f"nothing below {root} is both old enough and unused")
        return
    rows = [
        {
            "kind": each.kind,
            "size": format_bytes(each.bytes),
            "last used": f"{each.last:%Y-%m-%d}" if each.last else "",
            "what": each.path,
        }
        for each in plan.going
    ]
    with output():
        terminal = Terminal()
        terminal.print(Table(rows=rows, spare=("last used", "size"), right=("size",)))
        terminal.print(f"{len(plan.going)} to remove, {format_bytes(plan.bytes)}, below {root}")


def _row(item: Item, uri: str) -> dict[str, Any]:
    last = item.last.isoformat(timespec="seconds") if item.last else ""
    return {"uri": uri, "kind": item.kind, "bytes": item.bytes, "last": last}


def format_bytes(count: int) -> str:
    """Format a number of bytes for display."""
    size, unit = float(count), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if unit else f"{count} B"
