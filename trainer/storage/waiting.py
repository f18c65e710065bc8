"""Functions that wait with a timeout and log messages, and time marks that expire.

A mark is a small file with the time when an operation began. The writer may have been killed, or
the writer's clock may be wrong, so a mark is valid only if its time is close to the reader's
current time. An unreadable mark is invalid.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SAID_SECONDS = 10.0
_log = logging.getLogger(__name__)


def wait_until(
    is_over: Callable[[], bool], what: Callable[[], str], seconds: float, poll: float
) -> bool:
    """Wait at most `seconds` until `is_over` returns true. Return whether it did.

    Every ten seconds, log a warning that names what the process is waiting for.
    """
    began = said = time.monotonic()
    while not is_over():
        now = time.monotonic()
        if now - began >= seconds:
            return False
        if now - said >= SAID_SECONDS:
            said = now
            _log.warning("waiting up to %.0f s more for %s", seconds - (now - began), what())
        time.sleep(poll)
    return True


def is_recent(at: object, seconds: float) -> bool:
    """Return whether a mark's Unix time is less than `seconds` before or after the current time."""
    return isinstance(at, int | float) and abs(time.time() - at) < seconds
