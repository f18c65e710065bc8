"""The records of steps that share no folder: published by each step, read by the exit step.

On a KFP instance every step is a pod of its own, and what it noted on its disk goes with it. A step
publishes its record when it begins and again when it ends, at `<root>/<run id>/steps/NAME.json`. A
record without an end is that of a step that was killed. A step that is tried again replaces the
record of its earlier try, and adds up the time that was spent before:

    step, status, exit_code, error, figures, uri    as in the event `step_end`
    began, ended      seconds since 1970; `ended` is missing until it has
    seconds           of this try
    tries             this one included
    earlier_seconds   of all tries before this one
    held              what it holds of the cluster, see `components.gather_report`

A local run needs none of this: its steps share one file of events.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from trainer import storage
from trainer.errors import FAILED
from trainer.storage.retry import in_parallel, shorter_retry

log = logging.getLogger(__name__)
EXIT_STEP = "finish"
CONFIG = "config.json"
# For so long a store may fail before a step goes on without its record. A step that is asked to
# end has about a second.
_PATIENCE_SECONDS = 10.0
_KILLED = (
    "it began and left no word of its end: its pod was killed, as it is for want of memory, or its "
    "node was lost"
)


class PublishedRecord:
    """The record of one step; what cannot be written is one line, and never the step's failure."""

    def __init__(self, step: str, at: str) -> None:
        """Publish below `at`, the URI of the run; nothing at all where that is empty."""
        self._at, self._step, self._told = at, step, False
        self._record: dict[str, Any] = {
            "step": step,
            "status": "running",
            "began": round(time.time(), 3),
            "tries": 1,
            "earlier_seconds": 0.0,
        }

    def begin(self) -> None:
        """Publish that the step has begun, and take over what its earlier tries have spent."""
        if not self._at:
            return
        with self._never_in_the_way():
            if before := _read(_uri(self._at, self._step)):
                spent = before["earlier_seconds"] + max(self._seconds_of(before), 0.0)
                tries = before["tries"] + 1
                self._record |= {"tries": tries, "earlier_seconds": round(spent, 2)}
            self._write()

    def end(self, seconds: float, fields: Mapping[str, Any]) -> None:
        """Publish how the step ended after so many seconds."""
        if not self._at:
            return
        ended = round(self._record["began"] + seconds, 3)
        self._record |= {**fields, "ended": ended, "seconds": seconds}
        with self._never_in_the_way():
            self._write()

    @contextmanager
    def _never_in_the_way(self) -> Iterator[None]:
        # Once is enough: the end is tried all the same.
        with _harmless("" if self._told else f"the record of {self._step}") as told:
            yield
        self._told = self._told or bool(told)

    def _seconds_of(self, before: dict[str, Any]) -> float:
        """Return the seconds of an earlier try; one that was killed went on until somebody saw it.

        That is the next try, or the exit step where a failed run is tried again days later.
        """
        if "ended" in before:
            return float(before["ended"] - before["began"])
        exit_step = _read(_uri(self._at, EXIT_STEP))
        seen = exit_step["began"] if exit_step else 0.0
        return float((seen if seen > before["began"] else self._record["began"]) - before["began"])

    def _write(self) -> None:
        data = json.dumps(self._record, indent=2, default=str).encode()
        storage.write_bytes(_uri(self._at, self._step), data)


def publish_config(at: str, text: str) -> None:
    """Publish the configuration of the run at `at`, for its report; a failure is one line."""
    if at:
        with _harmless("the configuration"):
            storage.write_bytes(storage.join(at, CONFIG), text.encode())


def read(at: str, *, well: bool) -> list[dict[str, Any]]:
    """Return the records of the run at the URI `at`, in the order in which its steps began.

    Each has the `time` at which it ended, as an event has. The last one, where it has no end, was
    killed, unless the run ended `well`. A step that was followed by another one was done, whatever
    its record says: that of its last try could not be written.

    Raises:
        UserError: the store cannot be read.
    """
    folder = storage.join(at, "steps")
    found = in_parallel(lambda name: _read(storage.join(folder, name)), storage.names(folder))
    records = sorted((each for each in found if each), key=lambda each: each["began"])
    steps = [each for each in records if each["step"] != EXIT_STEP]
    ends = [each["began"] for each in records]
    settled = []
    for record in steps:
        last = record is steps[-1]
        if "ended" in record and (last or record["status"] == "done"):
            settled.append({**record, "time": record["ended"]})
            continue
        end = next((began for began in ends if began > record["began"]), time.time())
        settled.append(_guessed(record, end, killed=last and not well))
    return settled


def _guessed(record: dict[str, Any], end: float, *, killed: bool) -> dict[str, Any]:
    return {
        **record,
        "status": "failed" if killed else "done",
        "exit_code": FAILED if killed else 0,
        "error": _KILLED if killed else "",
        "seconds": round(max(end - record["began"], 0.0), 2),
        "figures": {},
        "uri": "",
        "time": end,
    }


def _uri(at: str, step: str) -> str:
    return storage.join(at, "steps", f"{step}.json")


def _read(uri: str) -> dict[str, Any] | None:
    try:
        record = json.loads(storage.read_bytes(uri))
    except storage.Missing:
        return None
    except ValueError:
        record = None
    if isinstance(record, dict) and _is_whole(record):
        return record
    log.warning("passed over: %s is no record of a step", uri)
    return None


def _is_whole(record: dict[str, Any]) -> bool:
    numbers = [record.get(name) for name in ("began", "tries", "earlier_seconds")]
    if "ended" in record:
        numbers += [record["ended"], record.get("seconds")]
        if not all(isinstance(record.get(name), str) for name in ("status", "error", "uri")):
            return False
        if not all(isinstance(record.get(name), dict) for name in ("figures", "held")):
            return False
    return isinstance(record.get("step"), str) and all(
        isinstance(number, int | float) and math.isfinite(number) for number in numbers
    )


@contextmanager
def _harmless(what: str) -> Iterator[list[Exception]]:
    """Let no failure of the store leave this block; say on standard error what is missing."""
    failed: list[Exception] = []
    # A step has its own end to tell, whatever goes wrong here.
    try:
        with shorter_retry(_PATIENCE_SECONDS):
            yield failed
    except Exception as error:
        failed.append(error)
        words = " ".join(str(error).split()) or type(error).__name__
        if what:
            with suppress(OSError):
                sys.stderr.write(f"flotilla: {what} could not be published: {words}\n")
