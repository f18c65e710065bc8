"""Waits with a time-out and a log message, and marks that expire.

A mark is a small file with the time when an operation began. Its writer may have been killed or
have a wrong clock, so that a mark is valid for a limited time before and after the reader's clock.
An unreadable mark is invalid.
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
    """Wait until `is_over` returns true, for at most `seconds`; return whether it did.

    A warning every ten seconds says what the process waits for.
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
    """Return whether a mark with this Unix timestamp is still valid."""
    return isinstance(at, int | float) and abs(time.time() - at) < seconds
