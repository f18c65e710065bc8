"""The live view of a run: redrawn in place on a terminal, otherwise lines at intervals."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from flotilla.components.table import EXIT_STEP, FIRST_STAGE, find_maker
from flotilla.pipelines.cli import display
from flotilla.trainer import events
from flotilla.trainer.events.progress import (
    LOG_SECONDS,
    LogLines,
    TimeLeft,
    convert_to_work,
    duration,
    format_epoch,
    format_event,
    format_parts,
)
from flotilla.trainer.events.progress import format_line as line_of_work
from flotilla.trainer.report.wording import key_metrics, round_value, spell_metric

if TYPE_CHECKING:
    from flotilla.pipelines.runs.kfp_run import RemoteRun
    from flotilla.trainer.sweeps.sweep import Sweep, Trial

_REFRESHES_PER_SECOND = 8
# The prefix of the last line of a task that fails with a user error. The rest is the error message.
_ERROR = "flotilla: "
_LONGEST_BAR, _SHORTEST_BAR = 40, 8
_LITTLE = 0.02


class LiveView:
    """The progress of a command on standard error, used as a context manager.

    On a terminal the view is redrawn in place. Otherwise lines are written at intervals.
    """

    def __init__(self) -> None:
        """Initialize the view without drawing it."""
        self._console = display.Terminal(stderr=True)
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._console.can_redraw:
            self._live = Live(
                console=self._console,
                get_renderable=self._view,
                refresh_per_second=_REFRESHES_PER_SECOND,
                transient=True,
                # Do not redirect, because the run's output does not pass through this process.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Restore the terminal."""
        if self._live:
            self._live.stop()

    def say(self, text: str | Text) -> None:
        """Show a permanent line, which is wrapped between words on a terminal."""
        room = self._console.width if self._console.can_redraw else sys.maxsize
        self._console.print(Group(*display.wrap_text(display.escape_controls(text), room)))

    def _view(self) -> RenderableType:
        raise NotImplementedError


class Steps(LiveView):
    """Shows the steps of a KFP run while it is running."""

    def __init__(self) -> None:
        """Initialize the view, which is empty until a run is shown."""
        super().__init__()
        self._run: RemoteRun | None = None
        self._seen: dict[str, Text] = {}
        # The time of each step's last progress line.
        self._said_at: dict[str, float] = {}

    def show(self, run: RemoteRun) -> None:
        """Show the changes since the last call."""
        self._run = run
        if self._live:
            self._live.refresh()
            return
        for step in run.steps:
            line = display.step_line(step, run.doing.get(step.name))
            if self._seen.get(step.name) != line:
                self._seen[step.name] = line
                self._console.print(line)
                self._said_at[step.name] = time.monotonic()
            self._show_progress(step.name)

    def _show_progress(self, step: str) -> None:
        at = self._run.doing.get(step) if self._run else None
        now = time.monotonic()
        if at and at.metrics and now - self._said_at.get(step, 0.0) >= LOG_SECONDS:
            self._said_at[step] = now
            words = at.metrics.get("progress") or ", ".join(
                f"{name} {value}" for name, value in key_metrics(at.metrics).items()
            )
            self.say(f"{step}: {words}")

    def _view(self) -> RenderableType:
        return display.steps_table(self._run) if self._run else ""


class Display(LiveView):
    """Shows the events of one run."""

    def __init__(self, command: str = "") -> None:
        """Create the view. For a process without steps, pass the `command` to show instead."""
        super().__init__()
        self._step: events.StepBegin | None = events.StepBegin(step=command) if command else None
        # The names of the stages that have ended, in order.
        self._ended: list[str] = []
        self._progress_seen: events.Progress | None = None
        self._validation: events.Validation | None = None
        # The newest progress of each active piece of work, keyed by its description.
        self._works: dict[str, events.WorkProgress] = {}
        self._is_stopping = False
        self._left = TimeLeft()
        self._lines = LogLines()

    def __call__(self, event: events.Event) -> None:
        """Show one event."""
        match event:
            case events.StepBegin():
                self._step = event
                self._say_in_log(f"{event.step} ...")
            case events.StepEnd():
                self._step_end(event)
            case events.Progress() | events.WorkProgress():
                self._progress(event)
            case events.Validation() if self._console.can_redraw:
                self._validation = event
            case events.Interrupted():
                self._is_stopping = True
                self._say_in_log(self._stopping())
            case events.TaskFailed():
                for line in _lines_of_failure(event):
                    self.say(line)
            case _ if line := format_event(event):
                self.say(line)

    def _say_in_log(self, text: str) -> None:
        """Print a line unless there is a live view, which shows the same information."""
        if not self._console.can_redraw:
            self.say(text)

    def _step_end(self, event: events.StepEnd) -> None:
        self._step = self._progress_seen = self._validation = None
        self._works.clear()
        self._left = TimeLeft()
        what = event.step
        if what == FIRST_STAGE and what in self._ended:
            # The first stage has already ended, so this error is from the dry run of the model,
            # which runs in parallel and reports its error under the name of the first stage.
            what = "the check of the configuration"
        self._ended.append(event.step)
        status = display.mark(event.status)
        self.say(Text.assemble(f"{what} ", status, f" in {duration(event.seconds)}"))

    def _progress(self, event: events.Progress | events.WorkProgress) -> None:
        if not self._console.can_redraw:
            if text := self._lines.take(event):
                self.say(text)
        elif isinstance(event, events.Progress):
            self._left.take(event)
            self._progress_seen = event
        elif event.is_over:
            self._works.pop(event.what, None)
        else:
            self._works[event.what] = event

    def _stopping(self) -> str:
        training = self._step is not None and self._step.step == find_maker("checkpoint").name
        return "stopping: saving the last checkpoint" if training else "stopping"

    def _view(self) -> RenderableType:
        return Group(
            self._first_line(),
            *(
                Text(f"  {line}", no_wrap=True, overflow="ellipsis")
                for line in self._metric_lines()
            ),
            *(work_line(event, self._console.width) for event in self._works.values()),
        )

    def _first_line(self) -> RenderableType:
        step, progress = self._step, self._progress_seen
        if step is None and progress is None:
            return _one_line(self._spinner, Text(self._describe_pause()))
        name = step.step if step else "training"
        passed = f"  {duration(max(time.time() - step.time, 0.0))}" if step else ""
        if self._is_stopping:
            return _one_line(self._spinner, Text(f"{name}  {self._stopping()}{passed}"))
        if progress is None:
            return _one_line(self._spinner, Text(f"{name}{passed}"))
        left = self._left.seconds(time.time())
        # Leave space for the spinner, the counts and the remaining time.
        width = max(min(self._console.width - len(name) - 36, _LONGEST_BAR), 4)
        return _one_line(
            self._spinner,
            Text(name),
            ProgressBar(progress.steps or None, progress.global_step, width=width),
            Text("/".join(map(str, filter(None, (progress.global_step, progress.steps))))),
            # Hide an estimate of zero, which would remain on the screen during a long last
            # validation.
            Text(f"{duration(left)} left" if left else ""),
        )

    def _describe_pause(self) -> str:
        """Describe the state of a run between two steps. KFP needs some time to start a step."""
        if EXIT_STEP.name in self._ended[-1:]:
            return "ending"
        if self._is_stopping:
            return "stopping"
        return "starting the next step" if self._ended else "starting"

    def _metric_lines(self) -> list[str]:
        lines = []
        if progress := self._progress_seen:
            speed = f"{progress.steps_per_second:.0f} steps/s"
            # Leave out a missing loss, because a user's own program need not report one.
            loss = f"    loss {round_value(progress.loss)}" if progress.loss else ""
            parts = [f"training{loss}", speed, format_epoch(progress)]
            lines.append("  ".join(filter(None, parts)))
        if found := self._validation:
            values = [f"{name} {round_value(value)}" for name, value in found.metrics.items()]
            end = f"at {found.global_step}"
            # Keep the metrics that fit. The main metric comes first.
            while len(values) > 1 and (
                len("  ".join(("  validation", *values, end))) > self._console.width
            ):
                values.pop()
            lines.append("  ".join(("validation", *values, end)))
        return lines


def work_line(event: events.WorkProgress, width: int) -> RenderableType:
    """Return the progress of a piece of work on one line, with the parts that fit."""
    parts = format_parts(event)
    what = Text(f"  {event.what}", no_wrap=True, overflow="ellipsis")
    if event.share < 0:
        return _one_line(what, Text("  ".join(parts), no_wrap=True, overflow="ellipsis"))
    # If space is short, drop the rate, then the activity, then the counts. Keep the percentage
    # and the remaining time.
    spare = [each for each in parts[1:] if "/s" in each or each == event.detail]
    room = width - len(what) - _SHORTEST_BAR - 3
    while len("  ".join(parts)) > room and spare:
        parts.remove(spare.pop(0))
    if len("  ".join(parts)) > room and parts[2:]:
        parts = [parts[0], *parts[2:]]
    bar = min(max(width - len(what) - len("  ".join(parts)) - 3, _SHORTEST_BAR), _LONGEST_BAR)
    return _one_line(what, ProgressBar(1.0, event.share, width=bar), Text("  ".join(parts)))


def _lines_of_failure(event: events.TaskFailed) -> Sequence[str]:
    """Return lines that tell how a task ended. Omit its output if the error is shown later."""
    said = f"{event.task} ended with {event.cause}"
    if not event.last_lines or event.last_lines[-1].startswith(_ERROR):
        return [said]
    return [f"{said}:", *event.last_lines]


def _one_line(*cells: RenderableType) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for _ in cells:
        table.add_column(no_wrap=True)
    table.add_row(*cells)
    return table


class SweepDisplay(LiveView):
    """Shows the progress of a sweep and of its active trials."""

    def __init__(self, sweep: Sweep) -> None:
        """Initialize the view of a new or resumed sweep."""
        super().__init__()
        self._sweep = sweep
        # For each active trial: its state as text, and the completed share of its rung.
        self._running: dict[int, tuple[str, float]] = {}
        self._began, self._before = time.time(), sweep.share({})
        self._said_at, self._what = self._began, "sweep"

    def trial(self, trial: Trial, line: str) -> None:
        """Show a line about a trial that has started or ended."""
        known = self._sweep.trials
        now = tuple(trial if each.number == trial.number else each for each in known)
        self._sweep = replace(self._sweep, trials=now)
        self._running.pop(trial.number, None)
        self.say(line)

    def __call__(self, trial: Trial, event: events.Event) -> None:
        """Update the view with an event of a trial's run. Any thread may call this."""
        words, share = self._running.get(trial.number, ("", 0.0))
        match event:
            case events.Interrupted():
                self._what = "sweep: stopping: saving the last checkpoints"
            case events.StepBegin():
                words = event.step
            case events.Progress():
                begin = self._sweep.rungs[trial.rung - 1] if trial.rung else 0
                share = (event.global_step - begin) / max(event.steps - begin, 1)
                words = line_of_work(convert_to_work(event))
            case events.WorkProgress() if not event.is_over:
                words = line_of_work(event)
        self._running[trial.number] = (words, share)
        now = time.time()
        if not self._console.can_redraw and now - self._said_at >= LOG_SECONDS:
            self._said_at = now
            self.say(line_of_work(self._work()))

    def _work(self) -> events.WorkProgress:
        from flotilla.trainer.sweeps.sweep import find_best

        trials = self._sweep.trials
        share = self._sweep.share({number: each[1] for number, each in self._running.items()})
        seconds, gain = time.time() - self._began, share - self._before
        counts = Counter(each.status for each in trials)
        parts = [f"{counts[each]} {each}" for each in ("running", "failed") if counts[each]]
        if counts["done"] + counts["failed"] == len(trials):
            parts = ["evaluating the best trial"]
        best = find_best(trials, self._sweep.objective)
        if best and best.last:
            name = spell_metric(best.last.by.metric)
            parts.append(f"best {name} {round_value(best.last.value)} (trial {best.number})")
        return events.WorkProgress(
            what=self._what,
            unit="trials",
            done=counts["done"] + counts["failed"],
            total=len(trials),
            share=min(share, 0.999),
            seconds=seconds,
            # Estimate the remaining time only after some progress, because nothing is trained in
            # the first seconds.
            seconds_left=(1 - share) * seconds / gain if gain > _LITTLE and share < 1 else -1.0,
            detail="  ".join(parts),
        )

    def _view(self) -> RenderableType:
        lines = [f"trial {number}: {each[0]}" for number, each in sorted(self._running.items())]
        passed = duration(time.time() - self._began)
        trials = replace(self._work(), what="trials", unit="done")
        return Group(
            _one_line(self._spinner, Text(f"{self._what}  {passed}")),
            work_line(trials, self._console.width),
            *(Text(f"  {each}", no_wrap=True, overflow="ellipsis") for each in lines),
        )
