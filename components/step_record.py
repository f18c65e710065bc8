"""The record of one step: when it began and ended, how, and with which figures."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from trainer import events, parent
from trainer.errors import FAILED, INTERRUPTED, RunInterruptedError, UserError


@dataclass(kw_only=True)
class StepRecord:
    """What a step leaves for the closing table and the report."""

    uri: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)

    def done(self, uri: str, figures: Mapping[str, Any]) -> None:
        """Note what was published, and its key figures."""
        self.uri, self.figures = uri, figures


@contextmanager
def recorded(name: str) -> Iterator[StepRecord]:
    """Run a step in this block and record its course.

    Raises:
        SystemExit: the block raised a `UserError`; its line was written to standard error.
    """
    parent.end_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    began = time.monotonic()
    record = StepRecord()

    def end(status: str, code: int, error: str) -> None:
        events.emit(
            "step_end",
            step=name,
            status=status,
            exit_code=code,
            error=error,
            seconds=round(time.monotonic() - began, 2),
            figures=dict(record.figures),
            uri=record.uri,
        )

    events.emit("step_begin", step=name)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield record
    except UserError as error:
        status = "interrupted" if error.exit_code == INTERRUPTED else "failed"
        end(status, error.exit_code, str(error))
        sys.stderr.write(f"flotilla: {name}: {error}\n")
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        end("failed", FAILED, f"bug in {name}: {type(error).__name__}: {error}")
        raise
    end("done", 0, "")


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise RunInterruptedError("interrupted")
