"""Live progress and tables of runs, on this machine and on a KFP instance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table

from pipelines.cli.exit import discard
from pipelines.runs.outcome import RunResult
from trainer import storage
from trainer.cluster.event_lines import LogLines, line_of, metrics_of
from trainer.events import Event, Progress, StepBegin, StepEnd, TaskFailed

if TYPE_CHECKING:
    from components.records.step_record import StepRecord
    from pipelines.runs.kfp_nodes import Step
    from pipelines.runs.kfp_run import RemoteRun

_MARKS = {
    "done": "[green]done[/]",
    "cached": "[green]cached[/]",
    "failed": "[red]failed[/]",
    "interrupted": "[yellow]interrupted[/]",
    "canceled": "[yellow]canceled[/]",
    "running": "[cyan]running[/]",
    "skipped": "skipped",
    "waiting": "waiting",
    "ending": "[yellow]ending[/]",
    "paused": "paused",
}


class Terminal(Console):
    """A console whose reader may go away: the run continues, and ends with its own exit code."""

    def __init__(self, *, stderr: bool = False) -> None:
        """Print text unchanged: `package.module:x:` is a name and no emoji."""
        super().__init__(stderr=stderr, highlight=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Discard what follows; rich itself would end the process, and the run with it."""
        discard(self.file)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            # What is shown of a run never ends it; an answer that is lost is reported.
            if not self.stderr:
                raise
            discard(self.file)


class Display:
    """Follows the events of one run; to be used as a context manager."""

    def __init__(self) -> None:
        """Write to standard error."""
        self._console = Terminal(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[metrics]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._bar: TaskID | None = None
        self._lines = LogLines()

    def __enter__(self) -> Display:
        """Begin to draw."""
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the terminal as it was."""
        self._bars.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case StepBegin():
                self._say(f"{event.step} ...")
            case StepEnd():
                self._step_end(event)
            case Progress():
                self._progress(event)
            case TaskFailed():
                for line in (f"{event.task} ended with {event.cause}:", *event.last_lines):
                    self._say_as_it_is(line)
            case _:
                if text := line_of(event):
                    self._say_as_it_is(text)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _say_as_it_is(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _step_end(self, event: StepEnd) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None
        self._say(f"{event.step} {_mark(event.status)} in {event.seconds:.1f} s")

    def _progress(self, event: Progress) -> None:
        if not self._console.is_terminal:
            if text := self._lines.take(event):
                self._say(text)
            return
        if self._bar is None:
            self._bar = self._bars.add_task("training", total=event.steps, metrics="")
        self._bars.update(self._bar, completed=event.global_step, metrics=metrics_of(event))


def _mark(status: str) -> str:
    # That of a newer version may be none of these.
    return _MARKS.get(status, escape(status))


def closing_table(result: RunResult) -> Table:
    """Return the table of all steps: status, seconds, key metrics, where."""
    table = Table(box=None, pad_edge=False)
    for title in ("step", "status", "seconds", "metrics", "where"):
        table.add_column(title, justify="right" if title == "seconds" else "left", overflow="fold")
    for step in result.steps:
        table.add_row(
            escape(step.step),
            _mark(step.status),
            f"{step.seconds:.1f}",
            escape(_metrics(step.metrics)),
            escape(_where(step)),
        )
    return table


def display_path(uri: str) -> str:
    """Return a path where there is one, below the current folder a relative one."""
    path = storage.local_path(uri) if uri else None
    if path is None:
        return uri
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _where(step: StepRecord) -> str:
    if step.status == "cached" and not step.uri:
        return "KFP's cache does not say"
    return display_path(step.uri)


def _metrics(metrics: Mapping[str, Any]) -> str:
    plain = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in metrics.items()
        if not isinstance(value, list | dict)
    ]
    return " ".join(plain[:4])


# Where the instance's word for a state is not ours.
_STATUS = {
    "PENDING": "waiting",
    "RUNTIME_STATE_UNSPECIFIED": "waiting",
    "SUCCEEDED": "done",
    "CANCELING": "ending",
}


class Steps:
    """Shows the steps of one run while it is running; to be used as a context manager."""

    def __init__(self) -> None:
        """Write to standard error: a table that changes on a terminal, else a line a change."""
        self._console = Terminal(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._seen: dict[str, str] = {}

    def __enter__(self) -> Steps:
        """Begin to draw."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the terminal as it was."""
        if self._console.is_terminal:
            self._live.stop()

    def show(self, run: RemoteRun) -> None:
        """Show what has changed."""
        if self._console.is_terminal:
            self._live.update(steps_table(run.steps), refresh=True)
            return
        for step in run.steps:
            if self._seen.get(step.name) != _word(step):
                self._seen[step.name] = _word(step)
                self._console.print(_line(step), soft_wrap=True)

    def say(self, text: str) -> None:
        """Show a line that stays, as it is."""
        self._console.print(text, markup=False, soft_wrap=True)


def steps_table(steps: Iterable[Step]) -> Table:
    """Return the table of steps: state and seconds."""
    table = Table("step", "status", Column("seconds", justify="right"), box=None, pad_edge=False)
    for step in steps:
        table.add_row(escape(step.name), _word(step), f"{step.seconds:.0f}")
    return table


def runs_table(runs: Iterable[RemoteRun]) -> Table:
    """Return the table of runs."""
    table = Table(box=None, pad_edge=False)
    for title in ("run", "name", "status", "created (UTC)"):
        # What is to be copied stays whole.
        table.add_column(title, overflow="fold", no_wrap=title == "run")
    for run in runs:
        table.add_row(run.run_id, escape(run.name), word(run.state), stamp(run.created))
    return table


def word(state: str) -> str:
    """Return our word for a state of KFP, with its colour."""
    status = _STATUS.get(state, state.lower())
    return _MARKS.get(status, escape(status))


def stamp(moment: datetime | None) -> str:
    """Return a moment for a table."""
    return f"{moment:%Y-%m-%d %H:%M}" if moment else ""


def _word(step: Step) -> str:
    return "[green]cached[/]" if step.cached else word(step.state)


def _line(step: Step) -> str:
    if step.state == "RUNNING" and not step.cached:
        return f"{escape(step.name)} ..."
    has_run = step.state in ("SUCCEEDED", "FAILED") and not step.cached
    seconds = f" in {step.seconds:.1f} s" if has_run else ""
    return f"{escape(step.name)} {_word(step)}{seconds}"
