"""A clock that advances only when a test sleeps, so that long waits take no time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest


class Clock:
    """Adds up the seconds that tests sleep; calls `each` at every sleep."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0
        self.each: Callable[[], object] = lambda: None
        began, monotonic = time.time(), time.monotonic()
        patch.setattr(time, "time", lambda: began + self.passed)
        patch.setattr(time, "monotonic", lambda: monotonic + self.passed)
        patch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.passed += seconds
        self.each()
