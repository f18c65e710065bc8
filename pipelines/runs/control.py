"""Lists, shows and cancels runs, on this machine or on a KFP instance.

A run with a folder below the workdir is local; any other run is on the instance. The KFP client is
imported only for a remote run, because its import takes about a second. A canceled run stops its
own cluster: see `trainer/cluster/local.py` for a local run, and
`components/kubernetes/launcher.py` for a remote one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.components.table import STEPS, SWEEP_STEPS, StepSpec
from flotilla.pipelines.runs import local_status
from flotilla.pipelines.runs.kfp_access import Instance, describe_no_page
from flotilla.pipelines.runs.log_view import LogView, OnLine
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.trainer.runtime.errors import DONE, ConfigError, UserError, nearest

if TYPE_CHECKING:
    from flotilla.pipelines.runs.kfp_client import Client
    from flotilla.pipelines.runs.kfp_run import RemoteRun
    from flotilla.pipelines.runs.kfp_watch import OnNote

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Cancellation:
    """The result of a cancellation. `was_running` is false if the run had already ended."""

    run_id: str
    was_running: bool
    message: str


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page of a run: the report of a local run, or the KFP page of a remote run."""

    run_id: str
    report: Path | None = None
    url: str = ""


def list_local(workdir: str | Path = RUNS, limit: int = 20) -> tuple[RunResult, ...]:
    """Return the runs on this machine, newest first."""
    folder = Path(workdir)
    return tuple(local_status.statuses(folder, local_status.run_ids(folder)[:limit]))


def list_remote(
    instance: Instance | None = None, *, experiment: str = "", limit: int = 20
) -> tuple[RemoteRun, ...]:
    """Return the runs on a KFP instance, of one experiment or of all, newest first."""
    from flotilla.pipelines.runs.kfp_client import NEWEST, connect, pages
    from flotilla.pipelines.runs.kfp_run import view
    from flotilla.pipelines.runs.submission import find_experiment

    client = connect((instance or Instance()).access())
    named: dict[str, Any] = {}
    if experiment:
        named = {"experiment_id": find_experiment(client, experiment)}
        if not named["experiment_id"]:
            every = pages(client.list_experiments, "experiments")
            hint = nearest(experiment, [str(each.display_name) for each in every])
            raise UserError(f"{client.access.endpoint} has no experiment {experiment!r}{hint}")
    runs = pages(client.list_runs, "runs", most=limit, sort_by=NEWEST, **named)
    return tuple(map(view, runs))


def status(run: str, *, workdir: str | Path = RUNS, instance: Instance | None = None) -> RunResult:
    """Return the result of a run, or its progress so far. Raises `UserError`.

    Example:
        flotilla.status("digits-20260101-120000-1a2b").status
    """
    if local_status.is_local(Path(workdir), run):
        return local_status.read_status(Path(workdir), run)
    from flotilla.pipelines.runs.kfp_outcome import judge_run
    from flotilla.pipelines.runs.kfp_run import find_run

    client = _client(run, workdir, instance)
    return judge_run(client, find_run(client, run))


def find_page(run: str, *, workdir: str | Path = RUNS, instance: Instance | None = None) -> Page:
    """Return the page of a run or a sweep. Raises `UserError`."""
    from flotilla.components.records import gather_report
    from flotilla.trainer.sweeps import page

    folder = Path(workdir)
    for name in (gather_report.PAGE, page.PAGE) if local_status.is_name(run) else ():
        if os.path.isfile(report := folder / run / name):
            return Page(run_id=run, report=report.absolute())
    if local_status.is_local(folder, run):
        state = local_status.read_status(folder, run).status
        raise UserError(
            f"run {run} is {state} and has no report; read its log with: flotilla logs {run}"
        )
    from flotilla.pipelines.runs.kfp_run import find_run

    client = _client(run, workdir, instance)
    found = find_run(client, run)
    url = client.page(f"runs/details/{found.run_id}")
    if not url:
        raise UserError(describe_no_page(client.access.endpoint))
    return Page(run_id=found.run_id, url=url)


def logs(
    run: str,
    *,
    on_line: OnLine,
    on_note: OnNote | None = None,
    step: str = "",
    task: str = "",
    follow: bool = False,
    verbose: bool = False,
    workdir: str | Path = RUNS,
    instance: Instance | None = None,
) -> RunResult:
    """Pass the readable lines of a run's logs to `on_line`, and return the state of the run.

    Args:
        run: id or name of the run.
        on_line: called with each line: its time, stage or training task, and text.
        on_note: called with a message about each missing log.
        step: the step or stage to read; all if empty.
        task: the training task to read, such as `chief-0`; all if empty.
        follow: whether to continue until the run ends.
        verbose: whether to pass all lines, including the startup lines of KFP and TensorFlow.
        workdir: the folder of local runs.
        instance: the KFP instance; the status of its runs is KFP's state in lower case.

    Raises:
        UserError: there is no such run, step or task, or its log is unreadable.

    Example:
        flotilla.logs(result.run_id, on_line=lambda line: print(line.label, line.text))
    """
    folder = Path(workdir)
    client = None if local_status.is_local(folder, run) else _client(run, workdir, instance)
    name, stages = select_step(step, (*STEPS, *SWEEP_STEPS)) if step else ("", ())
    view = LogView(stages=stages, task=task, verbose=verbose)
    if client is None:
        local_status.follow_logs((folder / run).absolute(), view, follow=follow, on_line=on_line)
        return local_status.read_status(folder, run)
    from flotilla.pipelines.runs.kfp_run import find_run
    from flotilla.pipelines.runs.kfp_watch import follow_logs, ignore

    last = follow_logs(
        client, find_run(client, run), name, view, follow=follow, on_line=on_line,
        on_note=on_note or ignore,
    )  # fmt: skip
    return RunResult(
        run_id=last.run_id, status=last.state.lower(), exit_code=DONE, message=last.error, steps=(),
        state=last.state,
    )  # fmt: skip


def select_step(name: str, rows: Sequence[StepSpec]) -> tuple[str, tuple[str, ...]]:
    """Return the step and the stages that a name selects. Raises `ConfigError` if it is unknown."""
    own = name.replace("-", "_")
    # If a step and a stage have the same name, the step takes precedence.
    for row in rows:
        if row.name == own:
            return own, tuple(stage.name for stage in row.stages)
    for row in rows:
        if any(stage.name == own for stage in row.stages):
            return row.name, (own,)
    stages = [stage.name for row in rows for stage in row.stages]
    known = dict.fromkeys([*(row.name for row in rows), *stages])
    hint = nearest(own, known) or f" (one of {', '.join(known)})"
    raise ConfigError(f"no step {name!r}{hint}")


def cancel(
    run: str, *, workdir: str | Path = RUNS, instance: Instance | None = None
) -> Cancellation:
    """Cancel a run. Training publishes a last checkpoint before it ends. Raises `UserError`.

    Example:
        flotilla.cancel("digits-20260101-120000-1a2b").was_running
    """
    folder = Path(workdir)
    if local_status.is_local(folder, run):
        # Do not send a second signal, because it would abort the upload of the last checkpoint.
        was_cancelled = local_status.is_cancelled(folder, run)
        was_running = was_cancelled or _interrupt((folder / run).absolute())
        already = "already " if was_cancelled else ""
        message = f"run {run} is {already}being cancelled; training publishes a last checkpoint"
        if not was_running:
            message = f"run {run} has already ended: {local_status.read_status(folder, run).status}"
        return Cancellation(run_id=run, was_running=was_running, message=message)
    return _cancel_remote(_client(run, workdir, instance), run)


def _cancel_remote(client: Client, run: str) -> Cancellation:
    from flotilla.pipelines.runs.kfp_client import REFUSED, InstanceError, ask
    from flotilla.pipelines.runs.kfp_outcome import WORKFLOW_GONE
    from flotilla.pipelines.runs.kfp_run import find_run
    from flotilla.pipelines.runs.kfp_watch import command

    remote, asked = find_run(client, run), False
    if not remote.has_ended and remote.state != "CANCELING":
        try:
            ask(client.terminate_run, remote.run_id)
            asked = True
        except InstanceError as error:
            # The instance refuses to cancel a run that is already being canceled or has ended.
            remote = find_run(client, remote.run_id)
            if remote.state == "CANCELING" and error.is_of_absent_workflow:
                raise UserError(f"run {remote.run_id}: {WORKFLOW_GONE}") from None
            if error.status != REFUSED or not (remote.has_ended or remote.state == "CANCELING"):
                raise
    message = f"run {remote.run_id} has already ended: {remote.state.lower()}"
    if not remote.has_ended:
        again = command(client.access, "status", remote.run_id)
        state = "is being cancelled" if asked else "is already ending"
        message = f"run {remote.run_id} {state}; check with: {again}"
    return Cancellation(run_id=remote.run_id, was_running=not remote.has_ended, message=message)


def _interrupt(folder: Path) -> bool:
    process = local_status.find_process(folder)
    if not process:
        return False
    try:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGTERM)
    except PermissionError:
        raise UserError(
            f"process {process} of the run belongs to another user; ask that user to cancel the run"
        ) from None
    return True


def _client(run: str, workdir: str | Path, instance: Instance | None) -> Client:
    from flotilla.pipelines.runs.kfp_client import connect

    try:
        return connect((instance or Instance()).access())
    except ConfigError as error:
        raise ConfigError(f"no run {run!r} below {workdir}, and {error}") from None
