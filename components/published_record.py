"""The records of steps that share no folder: published by each step, read by the exit step.

On a KFP instance every step is a pod of its own, and what it noted on its disk goes with it. A step
publishes its record when it begins and again when it ends, at `<root>/<run id>/steps/NAME.json`. A
record without an end is that of a step that was killed. A step that is tried again replaces the
record of its earlier try, and adds up the time that was spent before. The fields are those of
`StepRecord`.

A local run needs none of this: its steps share one file of events.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from components.step_record import StepRecord, record_of
from components.table import EXIT_STEP
from trainer import events, storage
from trainer.errors import FAILED
from trainer.events import StepResult
from trainer.storage.retry import in_parallel, shorter_retry

log = logging.getLogger(__name__)
CONFIG = "config.json"
# For so long a store may fail before a step goes on without its record. A step that is asked to
# end has about a second.
_RETRY_SECONDS = 10.0
_KILLED = (
    "it began and left no word of its end: its pod was killed, as it is for want of memory, or its "
    "node was lost"
)


class PublishedRecord:
    """The record of one step; what cannot be written is one line, and never the step's failure."""

    def __init__(self, step: str, at: str) -> None:
        """Publish below `at`, the URI of the run; nothing at all where that is empty."""
        self._at, self._has_failed = at, False
        self._record = StepRecord(step=step, status="running", began=events.now())

    def begin(self) -> None:
        """Publish that the step has begun, and add up what its earlier tries have taken."""
        if not self._at:
            return
        with self._never_in_the_way():
            if before := _read(_uri(self._at, self._record.step)):
                spent = before.earlier_seconds + max(self._seconds_of(before), 0.0)
                self._record = replace(
                    self._record, tries=before.tries + 1, earlier_seconds=round(spent, 2)
                )
            self._write()

    def end(self, result: StepResult, held: Mapping[str, Any]) -> None:
        """Publish how the step ended, and what it held of the cluster."""
        if not self._at:
            return
        began = self._record.began
        self._record = record_of(
            result,
            began=began,
            ended=round(began + result.seconds, 3),
            tries=self._record.tries,
            earlier_seconds=self._record.earlier_seconds,
            held=dict(held),
        )
        with self._never_in_the_way():
            self._write()

    @contextmanager
    def _never_in_the_way(self) -> Iterator[None]:
        # One line is enough: the end is tried all the same.
        what = "" if self._has_failed else f"the record of {self._record.step}"
        with _harmless(what) as failures:
            yield
        self._has_failed = self._has_failed or bool(failures)

    def _seconds_of(self, before: StepRecord) -> float:
        """Return the seconds of an earlier try; one that was killed lasted until that was seen.

        That is the next try, or the exit step where a failed run is tried again days later.
        """
        if before.ended is not None:
            return before.ended - before.began
        exit_step = _read(_uri(self._at, EXIT_STEP.name))
        seen = exit_step.began if exit_step else 0.0
        return (seen if seen > before.began else self._record.began) - before.began

    def _write(self) -> None:
        data = json.dumps(events.to_tree(self._record), indent=2, default=str).encode()
        storage.write_bytes(_uri(self._at, self._record.step), data)


def publish_config(at: str, text: str) -> None:
    """Publish the configuration of the run at `at`, for its report; a failure is one line."""
    if at:
        with _harmless("the configuration"):
            storage.write_bytes(storage.join(at, CONFIG), text.encode())


def read(at: str, *, well: bool) -> list[StepRecord]:
    """Return the records of the run at the URI `at`, in the order in which its steps began.

    The last one, where it has no end, was killed, unless the run ended `well`. A step that was
    followed by another one was done, whatever its record says: that of its last try could not be
    written.

    Raises:
        UserError: the store cannot be read.
    """
    folder = storage.join(at, "steps")
    found = in_parallel(lambda name: _read(storage.join(folder, name)), storage.names(folder))
    records = sorted((each for each in found if each), key=lambda each: each.began)
    steps = [each for each in records if each.step != EXIT_STEP.name]
    ends = [each.began for each in records]
    ended = []
    for record in steps:
        last = record is steps[-1]
        if record.ended is not None and (last or record.status == "done"):
            ended.append(record)
            continue
        end = next((began for began in ends if began > record.began), time.time())
        ended.append(_guessed(record, end, killed=last and not well))
    return ended


def _guessed(record: StepRecord, end: float, *, killed: bool) -> StepRecord:
    return replace(
        record,
        status="failed" if killed else "done",
        exit_code=FAILED if killed else 0,
        error=_KILLED if killed else "",
        seconds=round(max(end - record.began, 0.0), 2),
        metrics={},
        uri="",
        ended=None,
    )


def _uri(at: str, step: str) -> str:
    return storage.join(at, "steps", f"{step}.json")


def _read(uri: str) -> StepRecord | None:
    try:
        tree = json.loads(storage.read_bytes(uri))
    except storage.Missing:
        return None
    except ValueError:
        tree = None
    record = events.from_tree(StepRecord, tree)
    if record is None:
        log.warning("passed over: %s is no record of a step", uri)
    return record


@contextmanager
def _harmless(what: str) -> Iterator[list[Exception]]:
    """Let no failure of the store leave this block; say on standard error what is missing."""
    failed: list[Exception] = []
    # A step has its own end to tell, whatever goes wrong here.
    try:
        with shorter_retry(_RETRY_SECONDS):
            yield failed
    except Exception as error:
        failed.append(error)
        words = " ".join(str(error).split()) or type(error).__name__
        if what:
            with suppress(OSError):
                sys.stderr.write(f"flotilla: {what} could not be published: {words}\n")
