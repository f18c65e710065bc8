"""Waits and marks: no wait is without an end or a word, and no mark counts for ever.

A mark is a small file that says since when something is going on. Its writer may have been killed,
and the clock of its writer may be wrong by any time: it counts for so long on both sides of the
reader's clock, and one that cannot be read does not count.
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
    """Wait until `is_over`, for so many seconds at most; return whether it is.

    Every ten seconds a warning says what is waited for.
    """
    began = said = time.monotonic()
    while not is_over():
        now = time.monotonic()
        if now - began >= seconds:
            return False
        if now - said >= SAID_SECONDS:
            said = now
            _log.warning("waiting for %s, for %.0f s more at most", what(), seconds - (now - began))
        time.sleep(poll)
    return True


def is_recent(at: object, seconds: float) -> bool:
    """Say whether a mark of a time, in seconds since 1970, still counts."""
    return isinstance(at, int | float) and abs(time.time() - at) < seconds
