"""`flotilla runs`, `status`, `logs`, `cancel`: runs of a KFP instance and of this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.cli import display
from pipelines.cli.commands import output, print_json
from pipelines.cli.display import runs_table, steps_table, word
from pipelines.runs import local_status
from pipelines.runs.follow import command, follow_remote, goes_on, leaving
from pipelines.runs.kfp_client import Access, Client, ask, connect, pages
from pipelines.runs.kfp_outcome import outcome_of
from pipelines.runs.kfp_run import run_of, view
from pipelines.runs.outcome import Outcome
from pipelines.runs.submit import summary
from pipelines.runs.upload import NEWEST, equals, page_of
from trainer.errors import DONE, ConfigError, UserError, nearest

Find = Callable[[], Access]


def list_remote(access: Access, experiment: str, limit: int, *, as_json: bool) -> int:
    """Show the runs of an instance, newest first."""
    client = connect(access)
    named: dict[str, Any] = {}
    if experiment:
        found = next(experiments(client, equals("display_name", experiment)), None)
        if found is None:
            known = [str(each.display_name) for each in experiments(client)]
            hint = nearest(experiment, known)
            raise UserError(f"{access.endpoint} has no experiment {experiment!r}{hint}")
        named = {"experiment_id": str(found.experiment_id)}
    found_runs = pages(client.list_runs, "runs", most=limit, sort_by=NEWEST, **named)
    runs = [view(each) for each in found_runs]
    with output():
        display.Terminal().print(runs_table(runs) if runs else f"no runs at {access.endpoint}")
    if as_json:
        rows = [
            {
                "run_id": run.run_id,
                "name": run.name,
                "state": run.state,
                "created": run.created.isoformat() if run.created else "",
                "finished": run.finished.isoformat() if run.finished else "",
            }
            for run in runs
        ]
        print_json({"status": "done", "runs": rows})
    return DONE


def experiments(client: Client, only: str = "") -> Iterator[Any]:
    """Yield the experiments of the instance that a filter lets through."""
    named: dict[str, Any] = {"filter": only} if only else {}
    return pages(client.list_experiments, "experiments", **named)


def list_local(workdir: Path, limit: int, *, as_json: bool) -> int:
    """Show the runs on this machine, newest first."""
    rows = []
    for run_id in local_status.run_ids(workdir)[:limit]:
        found = local_status.status_of(workdir, run_id)
        rows.append({"run_id": run_id, "state": found.outcome.status})
    told = "\n".join(f"{row['run_id']}  {row['state']}" for row in rows)
    with output():
        sys.stdout.write(f"{told or f'no runs below {workdir}'}\n")
    if as_json:
        print_json({"status": "done", "runs": rows})
    return DONE


def status(run: str, workdir: Path, find: Find, *, as_json: bool) -> int:
    """Show how a run stands."""
    if local_status.is_local(workdir, run):
        found = local_status.status_of(workdir, run).outcome
        return _shown(run, found, as_json=as_json)
    client = _client(run, workdir, find)
    remote = run_of(client, run)
    if remote.has_ended:
        return _shown(remote.run_id, outcome_of(client, remote), as_json=as_json)
    place = page_of(client.access, f"runs/details/{remote.run_id}")
    terminal = display.Terminal()
    with output():
        terminal.print(steps_table(remote.steps))
        terminal.print(f"run {remote.run_id}: {word(remote.state)}", soft_wrap=True)
    if as_json:
        steps = {step.name: step.state for step in remote.steps}
        told = {"status": "running", "run_id": remote.run_id, "steps": steps}
        print_json({**told, "artifacts": {"run": place}})
    return DONE


def logs(run: str, workdir: Path, find: Find, step: str, *, follow: bool, as_json: bool) -> int:
    """Write the logs of a run to standard output, to its end where it is followed."""
    if local_status.is_local(workdir, run):
        folder = (workdir / run).absolute()
        if step:
            raise ConfigError(f"--step is for runs of an instance; {run} has one log for all steps")
        with leaving(lambda: _local_goes_on(run, workdir)):
            for piece in local_status.lines(folder, follow):
                with output():
                    sys.stdout.write(piece)
        ended = local_status.status_of(workdir, run).outcome
        found = {"status": ended.status, "run_id": run, "message": ended.message}
    else:
        client = _client(run, workdir, find)
        remote = run_of(client, run)
        with leaving(lambda: goes_on(client, remote.run_id)):
            last = follow_remote(client, remote, step.replace("-", "_"), follow)
        found = {"status": last.state.lower(), "run_id": last.run_id, "message": last.error}
    if as_json:
        print_json(dict(found))
    return DONE


def cancel(run: str, workdir: Path, find: Find, *, as_json: bool) -> int:
    """Ask a run to end."""
    if local_status.is_local(workdir, run):
        run_id = run
        standing = local_status.status_of(workdir, run)
        if standing.child:
            local_status.interrupt(standing)
            told = f"run {run} was asked to end; it publishes a last checkpoint, as at Ctrl-C"
        else:
            told = f"run {run} has ended already: {standing.outcome.status}"
        going = bool(standing.child)
    else:
        client = _client(run, workdir, find)
        remote = run_of(client, run)
        run_id, going = remote.run_id, not remote.has_ended
        told = f"run {run_id} has ended already: {remote.state.lower()}"
        if going:
            ask(client.terminate_run, run_id)
            again = command(client, "status", run_id)
            told = f"run {run_id} was asked to end; see: {again}"
    sys.stderr.write(f"{told}\n")
    if as_json:
        print_json({"status": "canceling" if going else "ended", "run_id": run_id, "message": told})
    return DONE


def _client(run: str, workdir: Path, find: Find) -> Client:
    try:
        return connect(find())
    except ConfigError as error:
        raise ConfigError(f"no run {run!r} below {workdir}, and {error}") from None


def _shown(run_id: str, outcome: Outcome, *, as_json: bool) -> int:
    with output():
        display.Terminal().print(display.closing_table(outcome))
        sys.stdout.write(f"run {run_id}: {outcome.status}\n")
    if outcome.message:
        sys.stderr.write(f"flotilla: {outcome.message}\n")
    if as_json:
        print_json(summary(run_id, outcome))
    return DONE


def _local_goes_on(run: str, workdir: Path) -> tuple[str, str]:
    if not local_status.status_of(workdir, run).child:
        return "interrupted", run
    cancel_it = f"flotilla cancel {run} --workdir {workdir}"
    return f"interrupted; the run {run} goes on; cancel it with: {cancel_it}", run
