"""What a launcher does when a person, or the system, asks it to end.

End with the process that started this one, however that one ended.

A cluster must not outlive its starter, `kill -9` included. The starter passes its process id in
the environment; the started process asks the kernel to be told.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
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


PARENT_VARIABLE = "FLOTILLA_PARENT"
_PR_SET_PDEATHSIG = 1  # prctl(2)


def parent_environment() -> dict[str, str]:
    """Return the variables that make a child, started with them, end with this process."""
    return {PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """End this process at once when the process that `environment` named has ended.

    Does nothing when no process was named. Linux and macOS; elsewhere nothing is watched.
    """
    named = os.environ.get(PARENT_VARIABLE, "")
    if not named.isdigit():
        return
    parent = int(named)
    if parent == os.getppid() and sys.platform == "linux":
        # The kernel's own signal also ends a process that is stopped or holds the interpreter.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            _kill_self()
        return
    # A shell may stand between the two (KFP's runner starts steps that way).
    try:
        wait = _watch_parent(parent)
    except ProcessLookupError:
        _kill_self()
    threading.Thread(target=_kill_self_after, args=(wait,), name="parent", daemon=True).start()


def _watch_parent(pid: int) -> object:
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    queue = select.kqueue()  # type: ignore[attr-defined,unused-ignore]
    ended = select.kevent(  # type: ignore[attr-defined,unused-ignore]
        pid,
        filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined,unused-ignore]
        flags=select.KQ_EV_ADD,  # type: ignore[attr-defined,unused-ignore]
        fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined,unused-ignore]
    )
    queue.control([ended], 0)
    return queue


def _kill_self_after(watched: object) -> None:
    if isinstance(watched, int):
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
    else:
        watched.control(None, 1)  # type: ignore[attr-defined]
    _kill_self()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
