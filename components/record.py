"""The frame around the work of one step: its events, its published record, and its exit."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from components.step_record import PublishedRecord
from components.table import EXIT_STEP
from trainer import events
from trainer.cluster import signals
from trainer.errors import DONE, FAILED, INTERRUPTED, RunInterruptedError, UserError
from trainer.events import StepBegin, StepEnd
from trainer.user_code import line_of, traceback_of

# Set by a runner that was asked to end: no step but the exit step does its work then.
STOPPING = "FLOTILLA_STOPPING"
_ASKED = "interrupted before the step was done"
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class StepOutput:
    """What a step leaves for the closing table and the report; `held` is for its cost."""

    uri: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    held: Mapping[str, Any] = field(default_factory=dict)

    def done(self, uri: str, metrics: Mapping[str, Any]) -> None:
        """Note what was published, and its key metrics."""
        self.uri, self.metrics = uri, metrics


@contextmanager
def recorded(
    name: str, at: str = "", *, inputs: Mapping[str, str] | None = None
) -> Iterator[StepOutput]:
    """Run a step in this block and record its course.

    Args:
        name: the step.
        at: URI of the run, below which the record is published; empty for none.
        inputs: URI by name of what the step takes that KFP may have had in its cache, where no step
            of this run has written it down.

    Raises:
        SystemExit: the block raised a `UserError`; its line was written to standard error.
    """
    signals.end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    course = _Course(name, at)
    events.emit(StepBegin(step=name, inputs=dict(inputs or {})))
    try:
        with _interruptible():
            # The exit step works even when the run was asked to end.
            if os.environ.get(STOPPING) and name != EXIT_STEP.name:
                raise RunInterruptedError(_ASKED)
            course.published.begin()
            yield course.output
    except UserError as error:
        course.fail(str(error), error.exit_code, traceback_of(error))
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        if trace := traceback_of(error):
            course.fail(f"the code that it was given raised {line_of(error)}", FAILED, trace)
            raise SystemExit(FAILED) from None
        words = " ".join(f"{type(error).__name__}: {error}".split())
        course.end("failed", FAILED, f"bug in {name}: {words}")
        raise
    course.end("done", DONE)


class _Course:
    """What is known of a step while it runs, and how its end is reported."""

    def __init__(self, name: str, at: str) -> None:
        self._name, self._began = name, time.monotonic()
        self.output, self.published = StepOutput(), PublishedRecord(name, at)

    def fail(self, error: str, code: int, trace: str) -> None:
        """Report an error that the user can fix: one line, and the traceback of the user's code."""
        if trace:
            log.error("%s", trace)
        status = "interrupted" if code == INTERRUPTED else "failed"
        self.end(status, code, error, trace, f"flotilla: {self._name}: {error}\n")

    def end(self, status: str, code: int, error: str = "", trace: str = "", line: str = "") -> None:
        """Emit and publish the end of the step; `line` goes to standard error."""
        ended = StepEnd(
            step=self._name,
            status=status,
            exit_code=code,
            error=error,
            traceback=trace,
            seconds=round(time.monotonic() - self._began, 2),
            metrics=dict(self.output.metrics),
            uri=self.output.uri,
        )
        events.emit(ended)
        # Before the store is asked, which may not answer for longer than a step has to end.
        sys.stderr.write(line)
        self.published.end(ended, self.output.held)


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
