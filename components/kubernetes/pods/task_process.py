"""The process of a task, which begins again in its pod when it was killed or lost its cluster.

A new pod has a new address, which the other tasks resolve up to 30 s later, and Kubernetes delays
it longer each time. A process that is started again in its pod keeps the address.

What each end of the task means (`RestartRule`):

- A code below 128 is final: done, or a failure that would come again.
- From 128 on (a signal, or `BEGIN_AGAIN`) the task begins again, up to a limit for this pod. Each
  such restart is an event in the log of the pod. Past the limit the guard ends with the code of
  the task, and whoever made the pod decides.
- A task that ends with `BEGIN_AGAIN` soon after its start has lost its cluster before that was
  whole, as after the restart of a server, whose name the others resolve one after another. That is
  part of the incident of the server: for two minutes it is neither counted nor an event.

Each attempt is a session and process group of its own, of which nothing is left when the next one
begins: a child of the task would hold its port. The guard is the init process of its container, and
reaps what the task leaves to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flotilla.components.kubernetes.pods.pod_state import describe_exit
from flotilla.trainer import events
from flotilla.trainer.cluster import termination
from flotilla.trainer.runtime import signals
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, RETRYABLE

log = logging.getLogger(__name__)
# A cluster that is lost in an attempt shorter than the first was not whole yet. It is waited for up
# to the second, which is longer than gRPC takes to resolve a name again
# (DNS_MIN_TIME_BETWEEN_RESOLUTIONS: 30 s).
SHORT_ATTEMPT_SECONDS, SETTLE_SECONDS = 60.0, 120.0
# Between two attempts; of attempts that are short, the starts are this far apart, and then twice as
# far each time, up to the second.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 10.0
_MOST_DOUBLINGS = 10
# How long killed children of a task may take to vanish.
GROUP_SECONDS = 10.0
_POLL_SECONDS = 0.01
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class NextAttempt(NamedTuple):
    """That a task begins again, after how many seconds, and whether that counts as a restart."""

    pause: float
    is_counted: bool


class RestartRule:
    """Decides whether a task that has ended begins again; `restarts` were counted in this pod."""

    def __init__(self, limit: float) -> None:
        """Allow `limit` restarts that count."""
        self.restarts = 0
        self._limit = limit
        # Attempts in a row that were short, and their seconds with the pauses after them.
        self._short, self._seconds = 0, 0.0

    def next_attempt(self, code: int, seconds: float) -> NextAttempt | None:
        """Decide after an attempt of so many seconds; None where its end is final."""
        if code < RETRYABLE:
            return None
        is_short = seconds < SHORT_ATTEMPT_SECONDS
        if not is_short:
            self._short, self._seconds = 0, 0.0
        settles = code == BEGIN_AGAIN and is_short and self._seconds + seconds < SETTLE_SECONDS
        if not settles:
            if self.restarts >= self._limit:
                return None
            self.restarts += 1
        distance = PAUSE_SECONDS * 2.0 ** min(self._short, _MOST_DOUBLINGS)
        pause = max(PAUSE_SECONDS, min(distance, LONGEST_PAUSE_SECONDS) - seconds)
        if is_short:
            self._short += 1
            self._seconds += seconds + pause
        return NextAttempt(pause, not settles)


class TaskProcess:
    """The process of one task; its attempts are started and waited for by the main thread.

    Signal handlers interrupt the main thread anywhere: the lock is reentrant, and a pipe wakes it.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], *, name: str, rule: RestartRule
    ) -> None:
        """Take the command of the task `name`, which `start` runs."""
        self._name, self._rule = name, rule
        self._command = command
        # Outside of a container nothing else ends the task where the guard is killed.
        self._environment = {**environment, **signals.parent_environment()}
        self._lock = threading.RLock()
        self._is_ending = False
        self._woken, self._waker = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def send_signal(self, number: int) -> None:
        """Forward a signal to the task, which does not begin again after it."""
        self.begin_no_more()
        with self._lock:
            # The main thread has not reaped it, so that no other process has its number.
            if self._process:
                os.kill(self._process.pid, number)

    def begin_no_more(self) -> None:
        """Make this attempt the last one; a pause ends at once."""
        if not self._is_ending:
            self._is_ending = True
            os.write(self._waker, b"\0")

    def wait(self) -> int:
        """Return the exit code of the last attempt: 128 and its number for a signal."""
        while True:
            code, seconds = self._end()
            following = None if self._is_ending else self._rule.next_attempt(code, seconds)
            if following is None:
                return code
            # At once: the launcher counts what ended first as the incident.
            self._report(code, following)
            # Readable from `begin_no_more` on.
            if select.select([self._woken], [], [], following.pause)[0]:
                return code
            termination.remove(Path.cwd())
            try:
                self.start()
            except OSError as error:
                log.warning("%s cannot be started again: %s", self._name, error)
                return code

    def start(self) -> None:
        """Start an attempt; one that was asked to end before it began ends. Raises `OSError`."""
        with self._lock:
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True
            )
        # A handler that ran meanwhile has found no process.
        if self._is_ending:
            self.send_signal(signal.SIGTERM)

    def _end(self) -> tuple[int, float]:
        """Wait for the end of the attempt and of its group; return its code and its seconds."""
        process = self._process
        assert process
        _await_end(process.pid)
        seconds = time.monotonic() - self._began
        # Until the process is reaped, no other group has its number.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with self._lock:
            self._process = None
            code = process.wait()
        _await_group(process.pid)
        return (code if code >= 0 else 128 - code), seconds

    def _report(self, code: int, following: NextAttempt) -> None:
        if not following.is_counted:
            log.warning("the cluster was lost at the start: a new attempt begins in this pod")
            return
        events.emit(
            events.Restart(
                task=self._name, cause=describe_exit(code), restarts=self._rule.restarts, code=code
            )
        )


def adopt_orphans() -> None:
    """Become the parent of what the task leaves, where the containers share their processes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _await_end(pid: int) -> None:
    """Return when a child has ended, without reaping it; reap orphans until then."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_pid == pid:
            continue
        if os.getsid(ended.si_pid) != os.getsid(0):
            os.waitpid(ended.si_pid, os.WNOHANG)
            continue
        # A child that another thread of the guard waits for.
        time.sleep(_POLL_SECONDS)


def _await_group(group: int) -> None:
    """Return when no process of a killed group is left."""
    until = time.monotonic() + GROUP_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            with suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            os.killpg(group, 0)
            time.sleep(_POLL_SECONDS)
        log.warning("children of the task do not end although they were killed")
