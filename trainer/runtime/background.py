"""A loop in the background: a function that is called at an interval, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

log = logging.getLogger(__name__)


class Loop:
    """Calls a function until it returns False, or `stop` is called; an error is logged once."""

    def __init__(
        self, work: Callable[[], object], seconds: float, *, name: str, failing: str
    ) -> None:
        """Describe a thread `name` with a pause before each call; `failing` says of an error."""
        self._work, self._seconds, self._failing = work, seconds, failing
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the loop was stopped, or has ended by itself."""
        return self._over.is_set()

    def start(self) -> Self:
        """Begin with a pause, after which the first call comes."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Call the function no more; one call may go on."""
        self._over.set()

    def join(self) -> None:
        """Wait until no call goes on, after `stop`."""
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
