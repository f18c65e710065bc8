"""A background thread that calls a function at an interval."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

log = logging.getLogger(__name__)


class Loop:
    """A loop that calls a function at an interval until it returns False or `stop` is called."""

    def __init__(
        self, work: Callable[[], object], seconds: float, *, name: str, failing: str
    ) -> None:
        """Store the arguments. The first of repeated errors is logged with the prefix `failing`."""
        self._work, self._seconds, self._failing = work, seconds, failing
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the loop was stopped or has ended."""
        return self._over.is_set()

    def start(self) -> Self:
        """Start the thread. The first call follows after one interval."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop calling the function. A call in progress may finish."""
        self._over.set()

    def join(self) -> None:
        """After `stop`, wait for the call in progress to finish."""
        self._thread.join()

    def _run(self) -> None:
        is_said = False
        while not self._over.wait(self._seconds):
            try:
                if self._work() is False:
                    self._over.set()
                is_said = False
            except Exception as error:
                if not is_said and not self._over.is_set():
                    log.warning("%s: %s", self._failing, error)
                is_said = True
