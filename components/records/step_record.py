"""Records of a run's steps: the last attempt of each step, and the earlier ones.

If the steps share a folder, the records are made from their events. On a KFP instance, each step
publishes its record to `<root>/<run id>/steps/NAME.json` when it begins, while it makes progress,
and when it ends. If the last record of a failed run has no end, its step was killed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from flotilla.components.records.run_store import CONFIG, STEPS, record_uri
from flotilla.components.table import EXIT_STEP, ends_run, find_step_of_stage, list_stages_after
from flotilla.trainer import storage
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.events import (
    Interrupted,
    RunBegin,
    RunEnd,
    StepBegin,
    StepEnd,
    StepResult,
    now,
    to_tree,
)
from flotilla.trainer.events.run_state import RunState, StepTry
from flotilla.trainer.runtime.errors import FAILED
from flotilla.trainer.runtime.json_records import read_record
from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.runtime.streams import say
from flotilla.trainer.storage.store import run_parallel, shorter_retry

log = logging.getLogger(__name__)
# The events from which the records and the outcome of a run are derived.
OF_STEPS = (RunBegin, StepBegin, StepEnd, Interrupted, RunEnd)
# How long, in seconds, requests to a store are retried before a step continues without its record.
_RETRY_SECONDS = 10.0
_KILLED_HERE = "the step was killed, or user code ended the process; see pipeline.log"
_KILLED_POD = (
    "the step started but did not record how it ended: the run was stopped, the pod of the step "
    "was killed (out of memory, or its node was lost), or the step could not write its record; for "
    "details, run `flotilla status`"
)


@dataclass(frozen=True, kw_only=True)
class Try:
    """A failed attempt that was retried. `began` is a Unix timestamp."""

    began: float
    seconds: float
    status: str
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepResult):
    """One step of a run. The fields inherited from `StepResult` describe its last attempt.

    Attributes:
        began: start time, a Unix timestamp like `ended`.
        earlier: the attempts before the last one.
        held: the cluster resources that the step uses, see `gather_report`.
        displays: URIs of the exit step's artifacts that show the report in the UI.
    """

    began: float
    ended: float | None = None
    earlier: tuple[Try, ...] = ()
    held: Mapping[str, Any] = field(default_factory=dict)
    displays: Mapping[str, str] = field(default_factory=dict)
    incidents: tuple[Mapping[str, Any], ...] = ()

    @property
    def main(self) -> MainMetric | None:
        """The metric that models are compared by, if the step reports one."""
        if not self.main_metric:
            return None
        return MainMetric(name=self.main_metric, better=self.better)

    @property
    def tries(self) -> int:
        """The number of attempts, including the last one."""
        return len(self.earlier) + 1

    @property
    def earlier_seconds(self) -> float:
        """The total seconds of all attempts before the last one."""
        return round(sum(each.seconds for each in self.earlier), 2)

    @property
    def spent(self) -> float:
        """The total seconds of all attempts."""
        return self.seconds + self.earlier_seconds


def make_record(result: StepResult, **more: Any) -> StepRecord:
    """Return the record of a result, with additional fields."""
    names = StepResult.__dataclass_fields__
    return StepRecord(**{name: getattr(result, name) for name in names}, **more)


def list_tries(state: RunState) -> tuple[StepRecord, ...]:
    """Return every attempt of every step, in order of start."""
    return tuple(_make_attempt(each, state) for each in state.tries)


def step_records(state: RunState) -> tuple[StepRecord, ...]:
    """Return the steps that the newest start of the run reached, with all of their attempts."""
    return _sum_attempts(*_split_by_start(state))


def all_step_records(state: RunState) -> tuple[StepRecord, ...]:
    """Return `step_records`, and the steps that only earlier starts reached, marked as skipped."""
    earlier, last = _split_by_start(state)
    reached = {each.step for each in last}
    missed = {each.step: each for each in earlier if each.step not in reached}
    skipped = [
        StepRecord(step=step, status="skipped", began=each.began) for step, each in missed.items()
    ]
    return _sum_attempts(earlier, [*last, *skipped])


def lost_stage(steps: Sequence[StepRecord]) -> str:
    """Return the next stage if a step was killed between two stages, or an empty string.

    A process that is killed at that point cannot report an error.
    """
    reached = [each for each in steps if each.step != EXIT_STEP.name and each.status != "skipped"]
    with suppress(LookupError, IndexError):
        last = reached[-1]
        if last.status == "done" and not ends_run(last.step, last.metrics.get("decision")):
            return list_stages_after(last.step, find_step_of_stage(last.step).name)[0]
    return ""


def _split_by_start(state: RunState) -> tuple[list[StepRecord], list[StepRecord]]:
    tries = list(zip(state.tries, list_tries(state), strict=True))
    earlier = [record for each, record in tries if each.start < state.start]
    return earlier, [record for each, record in tries if each.start == state.start]


def _make_attempt(each: StepTry, state: RunState) -> StepRecord:
    if each.end:
        return make_record(each.end, began=each.began, ended=each.end.time)
    begun = StepRecord(step=each.step, status="running", began=each.began)
    return _guess_record(begun, state.seen_until[each.start], error=_KILLED_HERE)


def _sum_attempts(
    earlier: Sequence[StepRecord], last: Sequence[StepRecord]
) -> tuple[StepRecord, ...]:
    newest = {each.step: each for each in last}
    before: dict[str, list[StepRecord]] = {name: [] for name in newest}
    for each in (*earlier, *last):
        if each.step in newest and each is not newest[each.step]:
            before[each.step].append(each)
    return tuple(
        replace(each, earlier=tuple(_try(one, one.seconds) for one in before[name]))
        for name, each in newest.items()
    )


def _try(record: StepRecord, seconds: float) -> Try:
    return Try(
        began=record.began, seconds=round(seconds, 2), status=record.status, error=record.error
    )


class PublishedRecord:
    """The published record of one step.

    A failed write is logged once and does not fail the step.
    """

    def __init__(self, step: str, at: str) -> None:
        """Publish below `at`, the URI of the run. Publish nothing if `at` is empty."""
        self.at, self._has_failed = at, False
        # The record of the exit step, if the exit step ran before this step began.
        self.reported: StepRecord | None = None
        self._record = StepRecord(step=step, status="running", began=now())

    def begin(self) -> None:
        """Publish the start of the step, with its earlier attempts."""
        if not self.at:
            return
        with self._never_in_the_way():
            if self._record.step != EXIT_STEP.name:
                self.reported = _read_record(record_uri(self.at, STEPS, EXIT_STEP.name))
            if before := _read_record(record_uri(self.at, STEPS, self._record.step)):
                last = _try(before, max(self._attempt_seconds(before), 0.0))
                if before.ended is None:
                    last = replace(last, status="failed", error=_KILLED_POD)
                self._record = replace(self._record, earlier=(*before.earlier, last))
            self._write()

    def again(self, failed: StepResult) -> None:
        """Publish the start of a new attempt after a failed one."""
        earlier = self._record.earlier
        last = _try(make_record(failed, began=self._record.began), failed.seconds)
        self._record = replace(self._record, began=now(), earlier=(*earlier, last))
        self._write()

    def progress(self, metrics: Mapping[str, Any]) -> None:
        """Publish the progress of the step."""
        self._record = replace(self._record, metrics=metrics)
        self._write()

    def end(self, result: StepResult, **more: Any) -> None:
        """Publish the end of the step. `more` sets further fields of its record."""
        began = self._record.began
        self._record = make_record(
            result,
            began=began,
            ended=round(began + result.seconds, 3),
            earlier=self._record.earlier,
            **more,
        )
        self._write()

    @contextmanager
    def _never_in_the_way(self) -> Iterator[None]:
        # Log only the first failure. Later writes are attempted in any case.
        what = "" if self._has_failed else f"the record of {self._record.step}"
        with harmless(what) as failures:
            yield
        self._has_failed = self._has_failed or bool(failures)

    def _attempt_seconds(self, before: StepRecord) -> float:
        """Return the seconds that an earlier attempt took.

        A killed attempt is assumed to have lasted until the exit step began or, if that did not
        run, until this attempt began.
        """
        if before.ended is not None:
            return before.ended - before.began
        seen = self.reported.began if self.reported else 0.0
        return (seen if seen > before.began else self._record.began) - before.began

    def _write(self) -> None:
        if not self.at:
            return
        with self._never_in_the_way():
            text = mask(json.dumps(to_tree(self._record), indent=2, default=str))
            storage.write_bytes(record_uri(self.at, STEPS, self._record.step), text.encode())


def publish_config(at: str, text: str) -> None:
    """Publish the run's configuration below `at` for its report. Log a failure in one line."""
    if at:
        with harmless("the configuration"):
            storage.write_bytes(storage.join(at, CONFIG), text.encode())


def read_records(at: str) -> list[StepRecord]:
    """Return the records of the run at `at`, in order of start. Raises `UserError`."""
    folder = storage.join(at, STEPS)
    found = run_parallel(
        lambda name: _read_record(storage.join(folder, name)), storage.names(folder)
    )
    return sorted((each for each in found if each), key=lambda each: each.began)


def read(at: str, *, well: bool) -> list[StepRecord]:
    """Return the records of the run at URI `at`, in order. Raises `UserError`.

    If the last record has no end, its step was killed, unless the run ended `well`. A step with a
    successor is done, even if its final record is missing. A stage that only an earlier pod of its
    step reached is skipped.
    """
    records = read_records(at)
    found = [each for each in records if each.step != EXIT_STEP.name]
    began = {each.step: each.began for each in found}
    missed = [each for each in found if _is_missed(each, began)]
    steps = [each for each in found if each not in missed]
    ends = [each.began for each in records]
    ended = []
    for record in steps:
        last = record is steps[-1]
        if record.ended is not None and (last or record.status == "done"):
            ended.append(record)
            continue
        end = next((began for began in ends if began > record.began), time.time())
        ended.append(_guess_record(record, end, error=_KILLED_POD if last and not well else ""))
    return [
        *ended,
        *(StepRecord(step=each.step, status="skipped", began=each.began) for each in missed),
    ]


def _is_missed(record: StepRecord, began: Mapping[str, float]) -> bool:
    with suppress(LookupError):
        names = [each.name for each in find_step_of_stage(record.step).stages]
        earlier = names[: names.index(record.step)]
        return any(began.get(name, 0.0) > record.began for name in earlier)
    return False


def _guess_record(record: StepRecord, end: float, *, error: str) -> StepRecord:
    """Return the record of a step that did not report its end, with `error` if it was killed."""
    return replace(
        record,
        status="failed" if error else "done",
        exit_code=FAILED if error else 0,
        error=error,
        seconds=round(max(end - record.began, 0.0), 2),
        metrics={},
        uri="",
        ended=None,
    )


def _read_record(uri: str) -> StepRecord | None:
    record = None
    try:
        record = read_record(StepRecord, storage.read_bytes(uri))
    except storage.Missing:
        return None
    except storage.Corrupt as error:
        log.warning("%s", error)
    if record is None:
        log.warning("skipping %s, which is not the record of a step", uri)
    return record


@contextmanager
def harmless(what: str) -> Iterator[list[Exception]]:
    """Log an exception in this block to standard error instead of raising it.

    The message states that `what` could not be published. If `what` is empty, nothing is logged.
    The exception is added to the list that the block receives.
    """
    failed: list[Exception] = []
    # Catch every exception, because a step must always report its end.
    try:
        with shorter_retry(_RETRY_SECONDS):
            yield failed
    except Exception as error:
        failed.append(error)
        words = " ".join(str(error).split()) or type(error).__name__
        if what:
            say(f"flotilla: {what} could not be published: {words}")
