"""What is known of each step of a run: its last try, and what the tries before it have taken.

A record is made from the events of a run on one machine, or read from where the step has published
it (see `components.published_record`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.errors import FAILED
from trainer.events import Event, RunBegin, StepBegin, StepEnd, StepResult

_KILLED = "the step was killed; see pipeline.log"


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepResult):
    """One step of a run; `StepResult` tells of its last try.

    Attributes:
        began: seconds since 1970.
        ended: the same, None until the step has ended.
        tries: the last one included.
        earlier_seconds: of all tries before the last.
        held: what it holds of the cluster, see `components.gather_report`.
    """

    began: float
    ended: float | None = None
    tries: int = 1
    earlier_seconds: float = 0.0
    held: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        """The seconds of all tries."""
        return self.seconds + self.earlier_seconds


def record_of(result: StepResult, **more: Any) -> StepRecord:
    """Return the record of a result, with the fields that a result does not have."""
    names = StepResult.__dataclass_fields__
    return StepRecord(**{name: getattr(result, name) for name in names}, **more)


def tries_of(events: Iterable[Event]) -> tuple[StepRecord, ...]:
    """Return every try of every step, in the order in which they began.

    A try that began and did not end was killed: it lasted until the last event before the next
    start of the run. Of the newest start it may still run.
    """
    return tuple(each for start in _starts(events) for each in _tries(start))


def last_start(events: Iterable[Event]) -> list[Event]:
    """Return the events since a run was last started or resumed."""
    return _starts(events)[-1]


def step_records(events: Iterable[Event]) -> tuple[StepRecord, ...]:
    """Return the steps of the newest start of a run, in the order in which they began.

    The tries of the same step in earlier starts count as its earlier tries.
    """
    *before, last = [_tries(start) for start in _starts(events)]
    return _summed([each for start in before for each in start], last)


def all_step_records(events: Iterable[Event]) -> tuple[StepRecord, ...]:
    """Return what `step_records` does, and as skipped what only earlier starts have reached."""
    *before, last = [_tries(start) for start in _starts(events)]
    earlier = [each for start in before for each in start]
    reached = {each.step for each in last}
    missed = {each.step: each for each in earlier if each.step not in reached}
    skipped = [
        StepRecord(step=step, status="skipped", began=each.began) for step, each in missed.items()
    ]
    return _summed(earlier, [*last, *skipped])


def _starts(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each start of a run; of at least one, which may be empty."""
    starts: list[list[Event]] = [[]]
    for event in events:
        if isinstance(event, RunBegin):
            starts.append([])
        starts[-1].append(event)
    return starts if starts[0] or len(starts) == 1 else starts[1:]


def _tries(start: Sequence[Event]) -> list[StepRecord]:
    tries: list[StepRecord] = []
    for event in start:
        if isinstance(event, StepBegin):
            seconds = round(start[-1].time - event.time, 2)
            killed = StepRecord(
                step=event.step,
                status="failed",
                exit_code=FAILED,
                error=_KILLED,
                began=event.time,
                seconds=seconds,
            )
            tries.append(killed)
        elif isinstance(event, StepEnd):
            ended = record_of(event, began=event.time - event.seconds, ended=event.time)
            for number, each in enumerate(tries):
                if each.step == event.step and each.ended is None:
                    tries[number] = replace(ended, began=each.began)
                    break
            else:
                tries.append(ended)
    return tries


def _summed(earlier: Sequence[StepRecord], last: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return the last try of each step in `last`, with what all tries before it have taken."""
    newest = {each.step: each for each in last}
    before: dict[str, list[StepRecord]] = {name: [] for name in newest}
    for each in (*earlier, *last):
        if each.step in newest and each is not newest[each.step]:
            before[each.step].append(each)
    return tuple(
        replace(
            each,
            tries=each.tries + len(before[name]),
            earlier_seconds=round(sum(one.seconds for one in before[name]), 2),
        )
        for name, each in newest.items()
    )
