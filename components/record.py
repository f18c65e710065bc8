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

from components.published_record import PublishedRecord
from components.table import EXIT_STEP
from trainer import events
from trainer.cluster import signals
from trainer.errors import FAILED, INTERRUPTED, RunInterruptedError, UserError
from trainer.events import StepBegin, StepEnd

# Set by a runner that was asked to end: no step but the exit step does its work then.
STOPPING = "FLOTILLA_STOPPING"
_ASKED = "interrupted before the step was done"


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
    name: str,
    at: str = "",
    *,
    inputs: Mapping[str, str] | None = None,
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
    began = time.monotonic()
    output, published = StepOutput(), PublishedRecord(name, at)

    def end(status: str, code: int, error: str, line: str = "") -> None:
        ended = StepEnd(
            step=name,
            status=status,
            exit_code=code,
            error=error,
            seconds=round(time.monotonic() - began, 2),
            metrics=dict(output.metrics),
            uri=output.uri,
        )
        events.emit(ended)
        # Before the store is asked, which may say nothing for longer than a step has to end.
        sys.stderr.write(line)
        published.end(ended, output.held)

    events.emit(StepBegin(step=name, inputs=dict(inputs or {})))
    try:
        with _interruptible():
            # The exit step works even when the run was asked to end.
            if os.environ.get(STOPPING) and name != EXIT_STEP.name:
                raise RunInterruptedError(_ASKED)
            published.begin()
            yield output
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
