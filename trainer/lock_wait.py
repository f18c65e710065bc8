"""Waiting for a lock whose holder may be dead: until it shows life, or expires. TensorFlow-free.

A task that was killed hard is started again at once, as another process and perhaps on another
machine, and finds the lock that it had itself: a chief that Kubernetes restarts, the retry of a
step. Nobody else can tell then whether the holder lives; its renewals can.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from trainer import events
from trainer.errors import RunInterruptedError
from trainer.interrupts import on_interrupt
from trainer.lock_holder import LASTS, HeldError, Holder, clock

LOOKED_EVERY = 2.0
log = logging.getLogger(__name__)


def acquired(acquire: Callable[[], None], pause: Callable[[float], None] = time.sleep) -> None:
    """Call `acquire`, again and again while who holds the lock may be dead.

    Args:
        acquire: takes the lock, or raises a `HeldError`.
        pause: waits for so many seconds.

    Raises:
        HeldError: the holder lives, another one was faster, or it has not expired after the
            `LASTS` seconds of a lock: its clock is wrong.
        RunInterruptedError: SIGINT or SIGTERM came.
        UserError: the store does not work.
    """
    first: Holder | None = None
    waited = 0.0
    while refused := _refusal(acquire):
        holder = refused.holder
        if holder.is_living or holder != (first or holder) or waited > LASTS:
            raise refused
        asked: list[None] = []
        # An exception out of a signal would be swallowed by what writes the log.
        with on_interrupt(partial(asked.append, None)):
            if first is None:
                _tell(refused)
            pause(LOOKED_EVERY)
        if asked:
            raise RunInterruptedError("interrupted, while another one may still hold the lock")
        first = holder
        waited += LOOKED_EVERY


def _refusal(acquire: Callable[[], None]) -> HeldError | None:
    try:
        acquire()
    except HeldError as error:
        return error
    return None


def _tell(error: HeldError) -> None:
    until = clock(error.holder.until)
    log.warning("%s holds the lock of %s until %s: it may be dead", error.holder, error.uri, until)
    events.emit("lock_awaited", uri=error.uri, holder=str(error.holder), until=until)
