"""The record of one step: when it began and ended, how, and with which figures."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from components.published_record import PublishedRecord
from trainer import events
from trainer.cluster import signals
from trainer.errors import FAILED, INTERRUPTED, RunInterruptedError, UserError

# Set by a runner that was asked to end: no step but the exit step does its work then.
STOPPING = "FLOTILLA_STOPPING"
_ASKED = "interrupted before the step was done"


@dataclass(kw_only=True)
class StepRecord:
    """What a step leaves for the closing table and the report; `held` is for its cost."""

    uri: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)

    def done(self, uri: str, figures: Mapping[str, Any]) -> None:
        """Note what was published, and its key figures."""
        self.uri, self.figures = uri, figures


def step_records(happened: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Return the last record of every step, in the order in which they began.

    A step that began and died without a word is one that failed.
    """
    records: dict[str, dict[str, Any]] = {}
    for event in happened:
        if event["event"] == "step_begin":
            records[event["step"]] = {
                "step": event["step"],
                "status": "failed",
                "exit_code": FAILED,
                "error": "the step was killed; see pipeline.log",
                "seconds": 0.0,
                "figures": {},
                "uri": "",
            }
        elif event["event"] == "step_end":
            records[event["step"]] = event
    return tuple(records.values())


@contextmanager
def recorded(
    name: str,
    at: str = "",
    *,
    exit_step: bool = False,
    inputs: Mapping[str, str] | None = None,
) -> Iterator[StepRecord]:
    """Run a step in this block and record its course.

    Args:
        name: the step.
        at: URI of the run, below which the record is published; empty for none.
        exit_step: whether it does its work even when the run was asked to end.
        inputs: URI by name of what the step takes that KFP may have had in its cache, where no step
            of this run has written it down.

    Raises:
        SystemExit: the block raised a `UserError`; its line was written to standard error.
    """
    signals.end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    began = time.monotonic()
    record, published = StepRecord(), PublishedRecord(name, at)

    def end(status: str, code: int, error: str, line: str = "") -> None:
        seconds = round(time.monotonic() - began, 2)
        told = {"status": status, "exit_code": code, "error": error}
        made = {"figures": dict(record.figures), "uri": record.uri}
        events.emit("step_end", step=name, **told, seconds=seconds, **made)
        # Before the store is asked, which may say nothing for longer than a step has to end.
        sys.stderr.write(line)
        published.end(seconds, {**told, **made, "held": dict(record.held)})

    events.emit("step_begin", step=name, **({"inputs": dict(inputs)} if inputs else {}))
    try:
        with _interruptible():
            if os.environ.get(STOPPING) and not exit_step:
                raise RunInterruptedError(_ASKED)
            published.begin()
            yield record
    except UserError as error:
        status = "interrupted" if error.exit_code == INTERRUPTED else "failed"
        end(status, error.exit_code, str(error), f"flotilla: {name}: {error}\n")
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        end("failed", FAILED, f"bug in {name}: {words}")
        raise
    end("done", 0, "")


@contextmanager
def _interruptible() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterruptedError(_ASKED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    # Libraries catch every `Exception`, give it other words, or go on.
    raise KeyboardInterrupt
