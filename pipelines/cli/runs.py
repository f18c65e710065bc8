"""`flotilla runs`, `status`, `logs`, `open`, `compare` and `cancel`, for local and remote runs."""

from __future__ import annotations

import os
import re
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.components.table import STAGES
from flotilla.pipelines.cli.completion import complete_runs, complete_steps
from flotilla.pipelines.cli.exit import Answer, answers, detaching, output, show_lines, write
from flotilla.pipelines.cli.options import RUNS, Run, RunsDir, Workdir, add_instance_options
from flotilla.pipelines.cli.run import make_answer
from flotilla.pipelines.runs.kfp_access import Instance, is_named
from flotilla.trainer.runtime.masking import join_lines
from flotilla.trainer.runtime.streams import say

if TYPE_CHECKING:
    from pathlib import Path

    from flotilla.pipelines.cli.display import Table
    from flotilla.pipelines.runs.control import Comparison
    from flotilla.pipelines.runs.log_view import LogLine
    from flotilla.pipelines.runs.outcome import RunResult


_STDOUT, _STDERR = 1, 2
_LABEL = max(len(stage.name) for stage in STAGES)


@answers
@add_instance_options
def list_runs(
    instance: Instance,
    experiment: Annotated[
        str, typer.Option(metavar="NAME", help="List only the runs of this KFP experiment.")
    ] = "",
    limit: Annotated[int, typer.Option(help="The maximum number of runs to list.", min=1)] = 20,
    workdir: RunsDir = RUNS,
) -> Answer:
    """List the runs of a KFP instance, or of this machine if no instance is given, newest first."""
    if experiment or is_named(instance.endpoint):
        return _list_remote(instance, experiment, limit)
    from flotilla.pipelines.cli.display import runs_table
    from flotilla.pipelines.runs import control

    found = control.list_local(workdir, limit)
    show_lines(runs_table(found) if found else f"no runs below {workdir}")
    return Answer(more={"runs": [_row(run) for run in found]})


def _row(run: RunResult) -> dict[str, Any]:
    from flotilla.pipelines.runs.outcome import find_model, measure_duration

    moment, seconds = measure_duration(run)
    return {
        "run_id": run.run_id,
        "state": run.status,
        "model": find_model(run),
        "created": moment.isoformat() if moment else "",
        "seconds": None if seconds is None else round(seconds, 1),
        "main_metric": run.main_metric.name if run.main_metric else "",
        "metrics": run.metrics,
    }


def _list_remote(instance: Instance, experiment: str, limit: int) -> Answer:
    from flotilla.pipelines.cli.display import remote_runs_table
    from flotilla.pipelines.runs import control

    access = instance.access()
    found = control.list_remote(instance, experiment=experiment, limit=limit)
    show_lines(remote_runs_table(found) if found else f"no runs at {access.endpoint}")
    rows = [
        {
            "run_id": run.run_id,
            "name": run.name,
            "state": run.state,
            "created": run.created.isoformat() if run.created else "",
            "finished": run.finished.isoformat() if run.finished else "",
        }
        for run in found
    ]
    return Answer(more={"runs": rows})


@answers
@add_instance_options
def status(instance: Instance, run: Run, workdir: RunsDir = RUNS) -> Answer:
    """Show the status of a run, on a KFP instance or on this machine."""
    from rich.text import Text

    from flotilla.pipelines.cli.display import Terminal, show_result, show_verdict, word
    from flotilla.pipelines.runs import control

    found = control.status(run, workdir=workdir, instance=instance)
    is_remote_running = bool(found.state) and found.status == "running"
    state = word(found.state) if is_remote_running else Text(found.status)
    with output():
        show_result(Terminal(), found)
        show_verdict(Terminal(), found)
        Terminal().print(Text.assemble(f"run {found.run_id}: ", state))
    if found.message and found.status != "refused":
        say(f"flotilla: {found.message}")
    if is_remote_running:
        return Answer(
            status=found.status,
            run_id=found.run_id,
            artifacts={"run": found.page} if found.page else {},
            more={"steps": found.states},
        )
    # Exit with 0, even if the run failed, because the command itself succeeded.
    return replace(make_answer(found), code=0)


@answers
@add_instance_options
def logs(
    instance: Instance,
    run: Run,
    step: Annotated[
        str,
        typer.Option(
            metavar="STEP", help="Show only this step or stage.", autocompletion=complete_steps
        ),
    ] = "",
    task: Annotated[
        str, typer.Option(metavar="TASK", help="Show only this training task, such as chief-0.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Follow the log until the run ends.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show all lines, including those of KFP and TensorFlow."),
    ] = False,
    workdir: RunsDir = RUNS,
) -> Answer:
    """Show the log of a run: its steps, losses, warnings and the output of your code."""
    from flotilla.pipelines.runs import control
    from flotilla.trainer.runtime.json_records import make_time

    days: list[str] = []

    def show(line: LogLine) -> None:
        found = make_time(line.time) if line.time else None
        moment = found.astimezone() if found else None
        day = f"{moment:%Y-%m-%d}" if moment else ""
        if day and day not in days[-1:]:
            days.append(day)
            write(f"{day} {moment:%Z}\n")
        clock = f"{moment:%H:%M:%S}" if moment else ""
        write(f"{join_lines(f'{clock:8}  {line.label:<{_LABEL}}  {line.text}')}\n")

    with detaching(lambda: _continues(run, workdir, instance)):
        found = control.logs(
            run, step=step, task=task, follow=follow, verbose=verbose, on_line=show,
            on_note=lambda line: say(f"flotilla: {line}"), workdir=workdir, instance=instance,
        )  # fmt: skip
    if found.status == "running":
        say("the run continues; follow it with -f")
    elif found.steps:
        say(found.headline)
    return Answer(status=found.status, run_id=found.run_id, message=found.message)


def _continues(run: str, workdir: Path, instance: Instance) -> tuple[str, str]:
    from flotilla.pipelines.runs import local_status
    from flotilla.pipelines.runs.kfp_watch import command

    if not local_status.is_local(workdir, run):
        return continues(run, command(instance.access(), "cancel", run))
    if local_status.read_status(workdir, run).status != "running":
        return "interrupted", run
    return continues(run, f"flotilla cancel {run} --workdir {workdir}")


def continues(run_id: str, cancel: str) -> tuple[str, str]:
    """Return the message for a user who stops watching a run, and the run's id."""
    return f"interrupted; the run {run_id} continues; cancel it with: {cancel}", run_id


@answers
@add_instance_options
def cancel(instance: Instance, run: Run, workdir: RunsDir = RUNS) -> Answer:
    """Cancel a run, on a KFP instance or on this machine. Training saves a last checkpoint."""
    from flotilla.pipelines.runs import control

    found = control.cancel(run, workdir=workdir, instance=instance)
    say(found.message)
    state = "canceling" if found.was_running else "ended"
    return Answer(status=state, run_id=found.run_id, message=found.message)


@answers
@add_instance_options
def open_(instance: Instance, run: Run, workdir: RunsDir = RUNS) -> Answer:
    """Open the report of a run, or the KFP page of a remote run, in the browser.

    The command always prints the address, even if it finds no browser.
    """
    from flotilla.pipelines.runs import control
    from flotilla.trainer import storage

    page = control.find_page(run, workdir=workdir, instance=instance)
    is_opened = open_page(page.report.as_uri() if page.report else page.url)
    if not is_opened:
        say("no browser was found on this machine; the page is at:")
    found = {"report": storage.uri_of(page.report)} if page.report else {"run": page.url}
    return Answer(
        run_id=page.run_id,
        artifacts=found,
        more={"opened": is_opened},
        text=f"{page.report or page.url}\n",
    )


def open_page(address: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Open a page in the user's browser. Return whether that succeeded."""
    has_choice = bool(environment.get("BROWSER"))
    is_elsewhere = "SSH_CONNECTION" in environment and "DISPLAY" not in environment
    if is_elsewhere and not has_choice:
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # A generic browser runs in this terminal, so it is used only if the user has chosen it.
    is_of_terminal = type(browser) is webbrowser.GenericBrowser
    if is_of_terminal and not has_choice:
        return False
    with _output_to_stderr():
        return browser.open(address)


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Redirect the standard output of child programs to standard error in this block."""
    before = os.dup(_STDOUT)
    try:
        os.dup2(_STDERR, _STDOUT)
        yield
    finally:
        os.dup2(before, _STDOUT)
        os.close(before)


@answers
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...", help="The ids of the runs.", autocompletion=complete_runs
        ),
    ],
    workdir: Workdir = RUNS,
) -> Answer:
    """Compare runs side by side."""
    from flotilla.pipelines.runs.control import compare as compare_runs

    found = compare_runs(runs, workdir)
    show_lines(_comparison_table(found))
    more = {"runs": found.runs, "comparison": found.groups}
    return Answer(more={**more, "main_metric": found.main_metric, "best": found.best})


def _comparison_table(found: Comparison) -> Table:
    from rich.text import Text

    from flotilla.pipelines.cli.display import Table
    from flotilla.trainer.events.progress import duration
    from flotilla.trainer.report.wording import format_value, round_value, spell_metric

    lines = []
    for group, rows in found.groups.items():
        # Name the group, because both training and the test split have a loss.
        before = f"{group}: " if group in ("test", "training") else ""
        after = f": {spell_metric(found.main_metric)}" if group == "next to it" else ""
        for name, row in rows.items():
            texts = [(format_value if group == "settings" else round_value)(each) for each in row]
            if name.startswith("seconds"):
                texts = [duration(each) for each in row]
            if group == "test":
                texts = _format_row(row, found.intervals.get(name))
            cells = [Text(text) for text in texts]
            if group == "test" and name == found.main_metric:
                cells = [
                    Text(f"{cell} best", "bold green") if run in found.best else cell
                    for run, cell in zip(found.runs, cells, strict=True)
                ]
            spelled = re.sub("^seconds", "duration", name)
            head = Text(f"{before}{spelled}{after}")
            lines.append({"": head, **dict(zip(found.runs, cells, strict=True))})
    numbers = {run: f"run {number}" for number, run in enumerate(found.runs, start=1)}
    return Table(rows=lines, right=found.runs, short=numbers)


def _format_row(row: list[Any], intervals: list[Any] | None) -> list[str]:
    """Return a metric's values, each with its difference from the first value."""
    from flotilla.trainer.report.headline import difference
    from flotilla.trainer.report.wording import like, round_value

    cells = []
    for value, interval in zip(row, intervals or [None] * len(row), strict=True):
        places = interval or like(value if isinstance(value, float) else 0.0)
        size = ""
        if isinstance(value, float) and isinstance(row[0], float):
            size = difference(value - row[0], places)
        sign = "+" if size and value > row[0] else "-"
        cells.append(
            f"{round_value(value, places)} ({sign}{size})" if size else round_value(value, places)
        )
    return cells
