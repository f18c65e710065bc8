"""What is to be written to the tracker: made of the events of a run, and safe to write twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer.errors import RunInterruptedError
from trainer.events import AttemptBegin, Event, Progress, Restart, StepEnd, Validation
from trainer.json_records import is_number
from trainer.masking import masked
from trainer.run_state import RunState

# As many points of a curve as a history has rows.
MOST_POINTS = 2000
# Of all curves, while the tracker is away.
MOST_WAITING = 20_000
_LONGEST_TAG = 4000
_TEST = "evaluation"


class Point(NamedTuple):
    """One value of a curve; `when` is in milliseconds since 1970.

    `repeats`: a new attempt may measure it again at a step near this one.
    """

    name: str
    value: float
    step: int
    when: int
    repeats: bool


@dataclass(kw_only=True)
class Pending:
    """Points and tags that are not written yet, and how the run ended, if it has."""

    points: deque[Point] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    tags: dict[str, str] = field(default_factory=dict)
    status: str = ""

    def __bool__(self) -> bool:
        """Say whether there is anything to write."""
        return bool(self.points or self.tags or self.status)

    def after(self, earlier: Pending) -> Pending:
        """Return this together with what was to be written before it."""
        points = deque([*earlier.points, *self.points], maxlen=MOST_WAITING)
        tags = {**earlier.tags, **self.tags}
        return Pending(points=points, tags=tags, status=self.status or earlier.status)


class Reader:
    """Turns the events of a run into what is to be written."""

    def __init__(self) -> None:
        """Begin before the first event."""
        self._state = RunState()
        # The global step of the last point of training.
        self._last = 0

    def read(self, event: Event) -> Pending:
        """Return what one event adds."""
        pending = Pending()
        self._state.take(event)
        if isinstance(event, AttemptBegin):
            # The tracker passes over what a repeated stretch has again.
            self._last = min(self._last, event.global_step)
            pending.tags["flotilla.attempt_from"] = str(event.global_step)
        elif isinstance(event, Progress):
            self._add_progress(event, pending)
        elif isinstance(event, Validation):
            _add(pending, "validation_", event.metrics, event.global_step, event.time)
        elif isinstance(event, Restart):
            pending.tags["flotilla.restarts"] = str(self._state.counts[Restart])
        elif isinstance(event, StepEnd):
            self._add_step(event, pending)
        return pending

    def _add_progress(self, event: Progress, pending: Pending) -> None:
        is_due = (event.global_step - self._last) * MOST_POINTS >= event.steps
        if not is_due and event.global_step < event.steps:
            return
        self._last = event.global_step
        values = {
            "loss": event.loss,
            "learning_rate": event.learning_rate,
            "steps_per_second": event.steps_per_second,
            **event.metrics,
        }
        _add(pending, "", values, event.global_step, event.time)

    def _add_step(self, event: StepEnd, pending: Pending) -> None:
        metrics = event.metrics
        if event.output == _TEST:
            _add(pending, "test_", metrics, self._state.handed_on_step, event.time)
        tags = {"uri": event.uri, "decision": metrics.get("decision")}
        if tags["decision"]:
            tags["reasons"] = "; ".join(map(str, metrics.get("reasons", ())))
        pending.tags |= {
            f"flotilla.{event.step}.{name}": _tag(str(text)) for name, text in tags.items() if text
        }
        if event.error:
            pending.tags["flotilla.error"] = _tag(f"{event.step}: {event.error}")


def _add(pending: Pending, prefix: str, values: Mapping[str, Any], step: int, time: float) -> None:
    """Add a point of each curve; without a prefix they are of training."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _add(pending, f"{prefix}{name}/", value, step, time)
        elif is_number(value):
            repeats = not prefix.startswith(("validation_", "test_"))
            point = Point(f"{prefix}{name}", float(value), step, int(time * 1000), repeats)
            pending.points.append(point)


def ended(status: str, message: str = "", verdict: str = "") -> Pending:
    """Return the end of a run: MLflow's `status`, why, and the verdict of the gate."""
    tags = {"flotilla.verdict": verdict, "flotilla.message": _tag(message)}
    return Pending(tags={key: value for key, value in tags.items() if value}, status=status)


def status_of(error: BaseException | None) -> str:
    """Return MLflow's word for how training ended."""
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, RunInterruptedError | KeyboardInterrupt) else "FAILED"


def _tag(text: str) -> str:
    return masked(text)[:_LONGEST_TAG]
