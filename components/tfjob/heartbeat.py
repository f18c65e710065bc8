"""The launcher's sign of life: an annotation on the job that it renews.

A guard beside the leading task ends training when the sign stands still, so that a launcher that
vanished without a word leaves no job. An annotation needs no permission beyond the job's own.
"""

from __future__ import annotations

import logging
import secrets
import threading

from components.tfjob import names
from components.tfjob.api import Api, RefusedError, UnreachableError

log = logging.getLogger(__name__)
# A sign may be missed a few times before the guard takes the launcher for gone.
SIGNS = 10
MOST_SECONDS = 20.0


class Heartbeat(threading.Thread):
    """Renews the annotation of a job until stopped."""

    def __init__(self, api: Api, name: str, deadline: float) -> None:
        """Beat `SIGNS` times in the seconds after which the guard gives the launcher up."""
        super().__init__(name="heartbeat", daemon=True)
        self._api = api
        self._name = name
        self._every = min(deadline / SIGNS, MOST_SECONDS)
        self._token = secrets.token_hex(4)
        self._count = 0
        self._halted = threading.Event()

    def sign(self) -> dict[str, str]:
        """Return the next value of the annotation; two launchers never give the same."""
        self._count += 1
        return {names.HEARTBEAT: f"{self._token}-{self._count}"}

    def stop(self) -> None:
        """Give no further sign."""
        self._halted.set()

    def run(self) -> None:
        """Give signs."""
        while not self._halted.wait(self._every):
            try:
                self._api.patch_job(self._name, {"metadata": {"annotations": self.sign()}})
            except UnreachableError as error:
                log.debug("no sign could be given: %s", error)
            except RefusedError as error:
                if error.is_forbidden:
                    log.warning("the job cannot be annotated, so that no guard watches: %s", error)
                    return
