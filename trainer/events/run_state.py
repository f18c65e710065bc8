"""The state of a run, which all readers compute from its events in the same way."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from flotilla.trainer import events
from flotilla.trainer.events import Event
from flotilla.trainer.events.progress import format_line

#: Kinds of events that records and the report show in addition to the ends of steps.
INCIDENTS = (
    events.Restart, events.ServersLost, events.Suspension, events.Stalled, events.TaskFailed,
    events.EvaluatorLeft, events.CheckpointPassedOver,
)  # fmt: skip
# A list of the newest 10,000 events. A run of several weeks may emit more events.
_newest = partial(deque[Any], maxlen=10_000)
_Kind = TypeVar("_Kind", bound=Event)


@dataclass(kw_only=True)
class StepTry:
    """One attempt at a step, in the run's start number `start`. `end` is None while it runs."""

    step: str
    began: float
    start: int
    end: events.StepEnd | None = None


@dataclass(kw_only=True)
class RunState:
    """The state of a run so far. "Newest" means the newest since the last start of the run.

    Attributes:
        start: number of earlier starts.
        counts: number of events of each kind, over all starts.
        global_step: the step that the newest attempt has reached, or at which it started.
        handed_on_step: global step of the selected checkpoint, or 0 before the selection.
        moved: Unix time at which `global_step` was reached, or 0 before training.
        seen_until: time of the last event, for each start.
        tries: every attempt of every step, in the order of their start.
        incidents: events of the kinds in `INCIDENTS`, and resumed attempts.
    """

    start: int = 0
    counts: Counter[type[Event]] = field(default_factory=Counter)
    global_step: int = -1
    moved: float = 0.0
    handed_on_step: int = 0
    seen_until: dict[int, float] = field(default_factory=dict)
    tries: list[StepTry] = field(default_factory=list)
    incidents: deque[Event] = field(default_factory=_newest)
    checkpoints: deque[events.CheckpointPublished] = field(default_factory=_newest)
    _newest: dict[type[Event], Event] = field(default_factory=dict)

    def take(self, event: Event) -> None:
        """Update the state with the next event."""
        if isinstance(event, events.RunBegin) and self.seen_until:
            self.start += 1
            self._newest.clear()
        self.seen_until[self.start] = max(event.time, self.seen_until.get(self.start, 0.0))
        self.counts[type(event)] += 1
        self._newest[type(event)] = event
        if isinstance(event, INCIDENTS) or (
            isinstance(event, events.AttemptBegin) and event.resumed
        ):
            self.incidents.append(event)
        match event:
            case events.AttemptBegin() | events.Progress():
                self.global_step, self.moved = event.global_step, event.time
            case events.HandedOn():
                self.handed_on_step = event.global_step
            case events.CheckpointPublished():
                self.checkpoints.append(event)
            case events.StepBegin():
                self.tries.append(StepTry(step=event.step, began=event.time, start=self.start))
            case events.StepEnd():
                self._end_step(event)

    def _end_step(self, event: events.StepEnd) -> None:
        if isinstance(step := event.metrics.get("handed_on_step"), int):
            self.handed_on_step = step
        open_ones = (
            each
            for each in self.tries
            if (each.step, each.start, each.end) == (event.step, self.start, None)
        )
        # If the begin event was lost on a full disk, compute its time from the end event.
        lost = StepTry(step=event.step, began=event.time - event.seconds, start=self.start)
        found = next(open_ones, lost)
        found.end = event
        if found is lost:
            self.tries.append(found)

    def newest(self, kind: type[_Kind]) -> _Kind | None:
        """Return the newest event of a kind, or None if there is none yet."""
        return cast("_Kind | None", self._newest.get(kind))

    @property
    def interrupted(self) -> bool:
        """Whether the run was asked to stop."""
        return events.Interrupted in self._newest

    @property
    def traceback(self) -> str:
        """The newest traceback of the user's code in a training task, or an empty string."""
        failed = self.newest(events.UserCodeFailed)
        return failed.traceback if failed else ""

    def progress_since(self, began: float) -> dict[str, Any]:
        """Return the progress of the step that started at `began`, and of its current work.

        The current work adds the text `progress`. It also adds `share` and `seconds_left` if it
        reports a share and training reports no progress.
        """
        found: dict[str, Any] = {}
        training, work = self.newest(events.Progress), self.newest(events.WorkProgress)
        if training and training.time >= began:
            names = ("global_step", "steps", "loss", "seconds_left", "epoch", "epochs")
            found = {name: getattr(training, name) for name in names}
        if work and work.time >= began and not work.is_over:
            found["progress"] = format_line(work)
            if "steps" not in found and work.share >= 0:
                found |= {"share": work.share, "seconds_left": work.seconds_left}
        return found

    @property
    def suspension(self) -> events.Suspension | None:
        """The current suspension of the job, or None if the job may run."""
        found = self.newest(events.Suspension)
        return None if found is None or found.is_over else found


def reduce_events(happened: Iterable[Event], *, newest_start: bool = False) -> RunState:
    """Return the state of a run after these events, or only after those since its newest start."""
    state = RunState()
    for event in happened:
        if newest_start and isinstance(event, events.RunBegin):
            state = RunState()
        state.take(event)
    return state
