"""Signals between the processes of a run: requests to stop, and the end of orphans.

A request to stop (`flotilla cancel`, Ctrl-C, the eviction of a pod) is a SIGTERM or SIGINT, which
handlers only record. It passes from the command to the last checkpoint as follows:

1. `flotilla.pipelines.cli.runs` implements the command.
2. `flotilla.pipelines.runs.control` signals the process group of the run, which includes the
running step. After Ctrl-C, `flotilla.pipelines.runs.local` does the same.
3. `flotilla.trainer.cluster.local`, in the process of the step, sends SIGTERM to the leading
task and waits until it exits.
4. `flotilla.trainer.training.chief`, in that task, records the signal (`catch_stop_signals`) for
its `Hooks.should_stop`.
5. `flotilla.trainer.training.loop` stops at the next barrier, with a last checkpoint.

No process outlives its parent, even if the parent is killed by SIGKILL. The parent passes its
process id in the environment, and the child asks the kernel to kill it when the parent exits.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

PARENT_VARIABLE = "FLOTILLA_PARENT"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # See prctl(2).
# Number of times to wake the main thread after a signal, and the interval in seconds.
_WAKES, _AGAIN_SECONDS = 20, 0.05


@contextmanager
def handle_interrupts(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` on SIGINT and SIGTERM in this block, if it runs in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handler(lambda _signal, _frame: callback()), _main_thread_woken():
        yield


@contextmanager
def _handler(handler: Callable[[int, FrameType | None], object] | int) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


@contextmanager
def _main_thread_woken() -> Iterator[None]:
    """Wake the main thread from a blocking call when another thread has received a signal.

    The kernel may deliver a signal to another thread while the main thread, which runs the
    handlers, waits. A wake-up is lost if the main thread starts to wait after it, so it is
    repeated.
    """
    main = threading.main_thread().ident
    assert main is not None
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wake() -> None:
        left = 0
        while True:
            if not select.select([reader], [], [], _AGAIN_SECONDS if left else None)[0]:
                left -= 1
                signal.pthread_kill(main, signal.SIGURG)
                continue
            number = os.read(reader, 1)
            if not number:
                return
            if number[0] in _STOP_SIGNALS:
                left = _WAKES
                signal.pthread_kill(main, signal.SIGURG)

    waker = threading.Thread(target=wake, name="signals", daemon=True)
    before = signal.signal(signal.SIGURG, lambda _signal, _frame: None)
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    waker.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        os.close(writer)
        waker.join()
        os.close(reader)
        signal.signal(signal.SIGURG, before)


def catch_stop_signals() -> Callable[[], bool]:
    """Record SIGINT and SIGTERM from now on. Return a function that tells whether one arrived."""
    seen: list[int] = []
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda number, _frame: seen.append(number))
    return lambda: bool(seen)


@contextmanager
def end_at_once() -> Iterator[None]:
    """Exit on SIGINT or SIGTERM in this block, even while TensorFlow is waiting."""
    is_main = threading.current_thread() is threading.main_thread()
    with _handler(signal.SIG_DFL) if is_main else nullcontext():
        yield


def end_at_hang_up() -> None:
    """Treat SIGHUP, which a closed terminal sends, as SIGTERM, unless it is ignored (`nohup`)."""
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))


def parent_environment() -> dict[str, str]:
    """Return the environment variables that make a child process exit with this process."""
    return {PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Kill this process when the process named by `parent_environment`, if any, exits."""
    named = os.environ.get(PARENT_VARIABLE, "")
    if not named.isdigit():
        return
    parent = int(named)
    if parent == os.getppid() and sys.platform == "linux":
        end_with(parent)
        return
    # KFP's runner starts steps in a shell, so the named process may not be the direct parent.
    try:
        wait = _watch_parent(parent)
    except ProcessLookupError:
        _kill_self()
    threading.Thread(target=_kill_self_after, args=(wait,), name="parent", daemon=True).start()


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent, with the id `parent`, exits. Linux only.

    The kernel's signal also kills a process that is stopped or blocked with the GIL held.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        _kill_self()


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
