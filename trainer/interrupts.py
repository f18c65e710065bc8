"""What a launcher does when a person, or the system, asks it to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_interrupt(ask: Callable[[], object]) -> Iterator[None]:
    """Call `ask` at each SIGINT and SIGTERM in this block; the handlers before it come back.

    Python gives signals to the main thread alone: in another one nothing is changed.
    """

    def handle(_signal: int, _frame: FrameType | None) -> None:
        ask()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
