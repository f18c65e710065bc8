"""What a task has to bring to a store while it trains: carried in the background, one at a time.

Things of one slot replace each other: of two checkpoints that wait, the newer one is enough.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from trainer import events, storage
from trainer.errors import UserError

Errand = Callable[[], None]
log = logging.getLogger(__name__)


class Outbox:
    """One thread that runs errands; never more than one is on its way."""

    def __init__(self) -> None:
        """Start the thread, which ends with the process."""
        self._waiting: dict[str, Errand] = {}
        self._failed: dict[str, tuple[Errand, UserError]] = {}
        self._broken: BaseException | None = None
        self._busy = False
        self._change = threading.Condition()
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def put(self, slot: str, errand: Errand) -> None:
        """Have `errand` run soon, in place of one that waits in the same slot.

        Raises:
            UserError: an earlier errand failed in a way that will not pass by itself.
        """
        with self._change:
            self._raise_lasting()
            self._waiting[slot] = errand
            self._change.notify_all()

    def settle(self) -> None:
        """Wait until all is carried; what a store was not available for is tried once more.

        Raises:
            UserError: something could not be carried.
        """
        with self._change:
            self._wait()
            for slot, (errand, _) in self._failed.items():
                self._waiting.setdefault(slot, errand)
            self._failed.clear()
            self._change.notify_all()
            self._wait()
            self._raise_lasting()
            for _, error in self._failed.values():
                raise error

    def _wait(self) -> None:
        self._change.wait_for(lambda: not self._waiting and not self._busy)

    def _raise_lasting(self) -> None:
        if self._broken:
            raise self._broken
        for _, error in self._failed.values():
            if not isinstance(error, storage.Unavailable):
                raise error

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting))
                slot = next(iter(self._waiting))
                errand = self._waiting.pop(slot)
                self._busy = True
            failure = self._attempt(errand)
            with self._change:
                self._busy = False
                # A newer one is about to show whether it still fails.
                if failure and slot not in self._waiting:
                    self._failed[slot] = (errand, failure)
                elif not failure:
                    self._failed.pop(slot, None)
                self._change.notify_all()

    def _attempt(self, errand: Errand) -> UserError | None:
        try:
            errand()
        except UserError as error:
            log.warning("%s", error)
            events.emit("not_published", reason=str(error))
            return error
        except BaseException as error:
            # A bug has to end training as it would on its own thread.
            self._broken = error
        return None
