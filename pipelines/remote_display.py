"""What a person sees of runs on a KFP instance: live steps, and tables."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pipelines.display import Terminal
from pipelines.remote_run import RemoteRun, Step

_WORDS = {
    "PENDING": "waiting",
    "RUNTIME_STATE_UNSPECIFIED": "waiting",
    "RUNNING": "[cyan]running[/]",
    "SUCCEEDED": "[green]done[/]",
    "SKIPPED": "skipped",
    "FAILED": "[red]failed[/]",
    "CANCELING": "[yellow]ending[/]",
    "CANCELED": "[yellow]canceled[/]",
    "PAUSED": "paused",
}


class Steps:
    """Shows the steps of one run while it goes on; to be used as a context manager."""

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
    table = Table(box=None, pad_edge=False)
    for title in ("step", "status", "seconds"):
        table.add_column(title, justify="right" if title == "seconds" else "left")
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
    return _WORDS.get(state, escape(state.lower()))


def stamp(moment: datetime | None) -> str:
    """Return a moment for a table."""
    return f"{moment:%Y-%m-%d %H:%M}" if moment else ""


def _word(step: Step) -> str:
    return "[green]cached[/]" if step.cached else word(step.state)


def _line(step: Step) -> str:
    if step.cached:
        return f"{escape(step.name)} {_word(step)}"
    if step.state == "RUNNING":
        return f"{escape(step.name)} ..."
    if step.state in ("SUCCEEDED", "FAILED"):
        return f"{escape(step.name)} {word(step.state)} in {step.seconds:.1f} s"
    return f"{escape(step.name)} {word(step.state)}"
