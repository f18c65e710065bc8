"""The live view of a run on this machine: what is drawn on a terminal, or a line now and then."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from components.table import maker_of
from pipelines.cli.display import Terminal, mark
from trainer.cluster.event_lines import LogLines, TimeLeft, line_of
from trainer.events import (
    Event,
    Interrupted,
    Progress,
    StepBegin,
    StepEnd,
    TaskFailed,
    Validation,
    WorkProgress,
)
from trainer.masking import one_line
from trainer.progress.durations import duration
from trainer.progress.wording import parts_of
from trainer.report.wording import rounded

_REFRESHES_PER_SECOND = 8
# How the line of an error begins that a user can mend; what a library wrote before it is noise.
_ERROR = "flotilla: "
_LONGEST_BAR, _SHORTEST_BAR = 40, 8
# Of the parts of a piece of work: per cent and time left.
_FEWEST = 2


class Display:
    """Follows the events of one run; to be used as a context manager."""

    def __init__(self, command: str = "") -> None:
        """Write to standard error: a view that changes on a terminal, else plain lines.

        It begins with `command`, where what is followed has no steps.
        """
        self._step: StepBegin | None = StepBegin(step=command) if command else None
        self._console = Terminal(stderr=True)
        self._spinner = Spinner("dots")
        self._progress_seen: Progress | None = None
        self._validation: Validation | None = None
        # The pieces of work that go on, by what is done.
        self._works: dict[str, WorkProgress] = {}
        self._is_stopping = False
        self._left = TimeLeft()
        self._lines = LogLines()
        self._live = Live(
            console=self._console,
            get_renderable=self._view,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            # The run's own output never passes through this process.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Display:
        """Begin to draw."""
        if self._console.can_redraw:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Leave the terminal as it was."""
        if self._console.can_redraw:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        match event:
            case StepBegin():
                self._step = event
                self._say_in_log(f"{event.step} ...")
            case StepEnd():
                self._step_end(event)
            case Progress():
                self._progress(event)
            case WorkProgress():
                self._work(event)
            case Validation() if self._console.can_redraw:
                self._validation = event
            case Interrupted():
                self._is_stopping = True
                self._say_in_log(self._stopping())
            case _:
                for line in _lines_of(event):
                    self._say_as_it_is(line)

    def _say_in_log(self, text: str) -> None:
        """Say what a view shows by itself."""
        if not self._console.can_redraw:
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _say_as_it_is(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _step_end(self, event: StepEnd) -> None:
        self._step = self._progress_seen = self._validation = None
        self._works.clear()
        self._left = TimeLeft()
        self._say(f"{event.step} {mark(event.status)} in {duration(event.seconds)}")

    def _progress(self, event: Progress) -> None:
        if not self._console.can_redraw:
            if text := self._lines.take(event):
                self._say(text)
            return
        self._left.take(event)
        self._progress_seen = event

    def _work(self, event: WorkProgress) -> None:
        if not self._console.can_redraw:
            if text := self._lines.take(event):
                self._say_as_it_is(text)
        elif event.is_over:
            self._works.pop(event.what, None)
        else:
            self._works[event.what] = event

    def _stopping(self) -> str:
        training = self._step is not None and self._step.step == maker_of("checkpoint").name
        return "stopping, saving the last checkpoint" if training else "stopping"

    def _view(self) -> RenderableType:
        """Return what is drawn now: the step with a spinner, and how far its work is."""
        return Group(
            self._first_line(),
            *(
                Text(f"  {one_line(line)}", no_wrap=True, overflow="ellipsis")
                for line in self._measured()
            ),
            *(work_line(event, self._console.width) for event in self._works.values()),
        )

    def _first_line(self) -> RenderableType:
        step, progress = self._step, self._progress_seen
        if step is None and progress is None:
            # KFP takes seconds to start the next one.
            return _one_line(self._spinner, Text("stopping" if self._is_stopping else "starting"))
        name = step.step if step else "training"
        passed = f"  {duration(max(time.time() - step.time, 0.0))}" if step else ""
        if self._is_stopping:
            return _one_line(self._spinner, Text(f"{name}  {self._stopping()}{passed}"))
        if progress is None:
            return _one_line(self._spinner, Text(f"{name}{passed}"))
        return _one_line(
            self._spinner,
            Text(name),
            ProgressBar(progress.steps, progress.global_step, width=self._bar_width(name)),
            Text(f"{progress.global_step}/{progress.steps}"),
            Text(self._time_left()),
        )

    def _bar_width(self, name: str) -> int:
        # Room for the spinner, the counts and the time left next to it.
        return max(min(self._console.width - len(name) - 36, _LONGEST_BAR), 4)

    def _time_left(self) -> str:
        left = self._left.seconds(time.time())
        # At the end of training, and in a long validation, it would be a zero that lasts.
        return f"{duration(left)} left" if left else ""

    def _measured(self) -> list[str]:
        lines = []
        if progress := self._progress_seen:
            speed = f"{progress.steps_per_second:.0f} steps/s"
            lines.append(f"training    loss {rounded(progress.loss)}  {speed}")
        if found := self._validation:
            values = "  ".join(f"{name} {rounded(value)}" for name, value in found.metrics.items())
            lines.append(f"validation  {values}  at {found.global_step}")
        return lines


def work_line(event: WorkProgress, width: int) -> RenderableType:
    """Return how far a piece of work is on one line; of its parts what has room."""
    parts = parts_of(event)
    what = Text(f"  {event.what}", no_wrap=True, overflow="ellipsis")
    if event.share < 0:
        return _one_line(what, Text("  ".join(parts), no_wrap=True, overflow="ellipsis"))
    # The rate is the first to go; what is left of the time, and per cent, are the last.
    spare = [each for each in parts[1:] if "/s" in each or each == event.detail]
    room = width - len(what) - _SHORTEST_BAR - 3
    while len("  ".join(parts)) > room and spare:
        parts.remove(spare.pop(0))
    if len("  ".join(parts)) > room and len(parts) > _FEWEST:
        parts = [parts[0], *parts[2:]]
    bar = min(max(width - len(what) - len("  ".join(parts)) - 3, _SHORTEST_BAR), _LONGEST_BAR)
    return _one_line(what, ProgressBar(1.0, event.share, width=bar), Text("  ".join(parts)))


def _lines_of(event: Event) -> Iterable[str]:
    if isinstance(event, TaskFailed):
        return (f"{event.task} ended with {event.cause}:", *_telling(event.last_lines))
    return filter(None, [line_of(event)])


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """Return the one line that says what is wrong where a task ended with one, else all."""
    return lines[-1:] if lines and lines[-1].startswith(_ERROR) else lines


def _one_line(*cells: RenderableType) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in cells:
        table.add_column(no_wrap=True)
    table.add_row(*cells)
    return table
