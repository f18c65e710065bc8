"""End with the process that started this one, however that one ended.

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

VARIABLE = "FLOTILLA_PARENT"
_PR_SET_PDEATHSIG = 1  # prctl(2)


def environment() -> dict[str, str]:
    """Return the variables that make a child, started with them, end with this process."""
    return {VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """End this process at once when the process that `environment` named has ended.

    Does nothing when no process was named. Linux and macOS; elsewhere nothing is watched.
    """
    named = os.environ.get(VARIABLE, "")
    if not named.isdigit():
        return
    parent = int(named)
    if parent == os.getppid() and sys.platform == "linux":
        # The kernel's own signal also ends a process that is stopped or holds the interpreter.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            _end()
        return
    # A shell may stand between the two (KFP's runner starts steps that way).
    try:
        wait = _watch(parent)
    except ProcessLookupError:
        _end()
    threading.Thread(target=_end_after, args=(wait,), name="parent", daemon=True).start()


def _watch(pid: int) -> object:
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


def _end_after(watched: object) -> None:
    if isinstance(watched, int):
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
    else:
        watched.control(None, 1)  # type: ignore[attr-defined]
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
