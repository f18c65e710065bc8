"""`flotilla check`, `doctor` and `gc`: checks before a run starts, and the removal of old data."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.pipelines.cli import options as opt
from flotilla.pipelines.cli.exit import Answer, answers, failure, output, show_lines
from flotilla.pipelines.runs.kfp_access import Instance
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import DONE, FAILED, ConfigError, UserError
from flotilla.trainer.runtime.masking import join_lines
from flotilla.trainer.runtime.streams import say

if TYPE_CHECKING:
    from pathlib import Path

    from flotilla.pipelines.doctor import Check, Finding
    from flotilla.pipelines.doctor.checks import DoctorOptions
    from flotilla.pipelines.retention import Item, Plan, Policy
    from flotilla.trainer.config.schema import Config as RunConfig

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}
_WIDTH = len("skipped")

_Namespace = Annotated[str, typer.Option("-n", "--namespace",
    help="The namespace of the steps, and of the job unless cluster.kubernetes sets one. "
    "Default: KFP_NAMESPACE, or else the namespace of the kubeconfig.")]  # fmt: skip
_ServiceAccount = Annotated[str, typer.Option(metavar="[NAMESPACE:]NAME",
    help="The service account of runs started from the KFP UI. Default: pipeline-runner.")
]  # fmt: skip


@answers
def check(
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    code: opt.Code = None,
) -> Answer:
    """Check a configuration, its data source and your code in seconds, without starting a run."""
    from flotilla.pipelines.doctor.machine import describe_model
    from flotilla.pipelines.runs.local import configuration, require_current_folder
    from flotilla.trainer.preflight.check import check as checked

    require_current_folder()
    loaded = configuration(config, assignments or (), label or ())
    if code:
        if not code.is_dir():
            raise ConfigError(f"--code: the folder {code} does not exist")
        os.environ[user_code.FOLDER_VARIABLE] = str(code.absolute())
    result = checked(loaded)
    notes = "".join(f"note: {join_lines(each)}\n" for each in result.notes)
    said = (
        describe_model(loaded, result.found) if result.found else "the configuration and the source"
    )
    more = {"found": dict(result.found), "notes": list(result.notes)}
    return Answer(text=f"{notes}ok: {join_lines(said)}\n", more=more)


@answers
@partial(opt.add_instance_options, namespace=_Namespace)
@lambda command: opt.add_pod_options(command, "pull_secrets", "mounts")
def doctor(
    instance: Instance,
    pods: Any,
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    workdir: opt.Workdir = opt.RUNS,
    kubernetes: Annotated[
        bool,
        typer.Option("--kubernetes", help="Check the cluster even if cluster.launcher is local."),
    ] = False,
    service_account: _ServiceAccount = "",
    image: opt.Image = "",
) -> Answer:
    """Check whether this machine or the cluster is ready for a run, without starting one."""
    from flotilla.pipelines.doctor.checks import DoctorOptions
    from flotilla.pipelines.doctor.cluster import check_name
    from flotilla.pipelines.runs.kfp_access import check_namespace, find_namespace
    from flotilla.pipelines.runs.local import configuration, require_current_folder
    from flotilla.pipelines.step_settings import check_image

    require_current_folder()
    check_name(service_account)
    check_image(image)
    check_namespace(find_namespace(instance.namespace))
    try:
        loaded: RunConfig | UserError = configuration(config, assignments or (), label or ())
    except UserError as error:
        loaded = error
    options = DoctorOptions(
        config=loaded,
        workdir=workdir,
        instance=instance,
        kubernetes=kubernetes,
        service_account=service_account,
        image=image,
        pods=pods,
    )
    answer = _examine(options)
    return replace(answer, code=loaded.exit_code) if isinstance(loaded, UserError) else answer


def _examine(options: DoctorOptions) -> Answer:
    from flotilla.pipelines.cli.display import Terminal
    from flotilla.pipelines.doctor import examine
    from flotilla.pipelines.doctor.checks import checks

    terminal = Terminal()
    listed = checks(options)

    def show(check: Check, finding: Finding) -> None:
        remedy = f"; fix or inspect it with: {finding.remedy}" if finding.remedy else ""
        with output():
            terminal.print(f"{finding.state:{_WIDTH}}", style=_COLOURS[finding.state], end="  ")
            terminal.print(f"{check.name}: {finding.message}{remedy}")

    found = list(zip(listed, examine(listed, show), strict=True))
    rows = [{"name": check.name, **asdict(finding)} for check, finding in found]
    failed = [check.name for check, finding in found if finding.state == "fail"]
    return Answer(
        status="failed" if failed else "done",
        code=FAILED if failed else DONE,
        message=f"failed: {', '.join(failed)}" if failed else "",
        more={"checks": rows},
    )


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_STEP = 1000
KeepRuns = Annotated[str, typer.Option(metavar="TIME",
    help="Keep runs that were active within this time, such as 30d. Remove older runs, "
    "datasets, checkpoints and code, unless a kept run or version needs them.")]  # fmt: skip
KeepVersions = Annotated[int | None, typer.Option(metavar="N",
    help="Keep the newest N versions of each model, the champion, and the versions that a "
    "rollback or the gate needs. Remove the others.")]  # fmt: skip
DryRun = Annotated[bool, typer.Option("--dry-run",
    help="List what --keep-runs and --keep-versions would remove, and remove nothing.")
]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", help="Remove without asking for confirmation.")]


@answers
def gc(
    config: opt.Config = None,
    assignments: opt.Assignments = None,
    workdir: opt.Workdir = opt.RUNS,
    keep_runs: KeepRuns = "",
    keep_versions: KeepVersions = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> Answer:
    """Remove files left by interrupted writes and, on request, old runs and versions."""
    from flotilla.pipelines.retention import policy
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

    from flotilla.pipelines.retention import make_plan
    from flotilla.pipelines.retention.inventory import read
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
        return replace(failed, more={**facts, "removed": removed})
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
    from flotilla.pipelines.cli.display import Table

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
    table = Table(rows=rows, spare=("last used", "size"), right=("size",))
    show_lines(table, f"{len(plan.going)} to remove, {format_bytes(plan.bytes)}, below {root}")


def _row(item: Item, uri: str) -> dict[str, Any]:
    last = item.last.isoformat(timespec="seconds") if item.last else ""
    return {"uri": uri, "kind": item.kind, "bytes": item.bytes, "last": last}


def format_bytes(count: int) -> str:
    """Format a number of bytes for display."""
    size, unit = float(count), 0
    while size >= _STEP and unit < len(_UNITS) - 1:
        size, unit = size / _STEP, unit + 1
    return f"{size:.3g} {_UNITS[unit]}" if unit else f"{count} B"
