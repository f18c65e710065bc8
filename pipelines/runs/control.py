"""Lists, shows, compares and cancels runs, on this machine or on a KFP instance.

A run with a folder below the workdir is local; any other run is on the instance. The KFP client is
imported only for a remote run, because its import takes about a second. A canceled run stops its
own cluster: see `trainer/cluster/local.py` for a local run, and
`components/kubernetes/launcher.py` for a remote one.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.components.table import STEPS, SWEEP_STEPS, StepSpec
from flotilla.pipelines import notebook
from flotilla.pipelines.runs import local, local_status
from flotilla.pipelines.runs.kfp_access import Instance, describe_no_page
from flotilla.pipelines.runs.log_view import LogView, OnLine
from flotilla.pipelines.runs.outcome import RunResult
from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import BY_LOSS, MainMetric, main_first
from flotilla.trainer.report import headline
from flotilla.trainer.runtime.errors import DONE, ConfigError, UserError, nearest
from flotilla.trainer.runtime.json_records import is_number

if TYPE_CHECKING:
    from flotilla.pipelines.runs.kfp_client import Client
    from flotilla.pipelines.runs.kfp_run import RemoteRun
    from flotilla.pipelines.runs.kfp_watch import OnNote

RUNS = Path("runs")
_FEWEST = 2
_PROGRESS = ("loss", "validation_loss", "steps_per_second", "seconds")


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
        local.check_run_id(workdir, run)
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
    from flotilla.components.records import gather_report

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
