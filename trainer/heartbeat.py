"""Signs of life of a task: bytes in a pipe to the process that started it.

A process that is stopped, swapped out or stuck in the kernel dies no death that anyone could wait
for. While a task lives it writes a byte now and then; whoever started it waits for bytes. A starter
that was itself asleep finds those of the time between, so that nobody is taken for dead then.
"""

from __future__ import annotations

import os
import select
import threading
import time
from contextlib import suppress

VARIABLE = "FLOTILLA_HEARTBEAT"
# A task that starts loads TensorFlow, which holds the interpreter for long on a busy machine.
STARTING_SECONDS = 180.0
# Beats that may be missed before a heart has stood still.
_BEATS = 5


def environment(descriptor: int, seconds: float) -> dict[str, str]:
    """Return the variables that let a child show life on `descriptor` well within `seconds`."""
    return {VARIABLE: f"{descriptor}:{min(1.0, seconds / _BEATS)}"}


def begin() -> None:
    """Show life from now on, where the starter of this process asked for it."""
    descriptor, _, seconds = os.environ.pop(VARIABLE, "").partition(":")
    if descriptor.isdigit():
        arguments = (int(descriptor), float(seconds))
        threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True).start()


def stood_still(descriptor: int, seconds: float) -> bool:
    """Wait until no byte has come for `seconds` (true), or the last writer has gone (false).

    The first byte may take longer; see `STARTING_SECONDS`.
    """
    patience = max(seconds, STARTING_SECONDS)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(patience * 1000):
        if not os.read(descriptor, 1 << 16):
            return False
        patience = seconds
    return True


def _beat(descriptor: int, seconds: float) -> None:
    # Nobody listens any more, which is for others to judge.
    with suppress(OSError):
        while True:
            os.write(descriptor, b".")
            time.sleep(seconds)
