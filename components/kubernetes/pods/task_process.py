"""The process of a task, restarted in its pod after a kill or the loss of its cluster.

A new pod has a new address, which the other tasks resolve up to 30 s later, and Kubernetes'
back-off grows each time. A process that is restarted in its pod keeps the address.

The meaning of each exit code of the task (`RestartRule`):

- A code below 128 is final: success, or a failure that would repeat.
- From 128 on (a signal, or `BEGIN_AGAIN`) the task is restarted, up to a limit for this pod. Each
  such restart is an event in the log of the pod. Past the limit the guard exits with the code of
  the task, and the pod's controller decides.
- A task that ends with `BEGIN_AGAIN` soon after its start has lost a cluster that was not yet
  complete, for example after the restart of a server, whose new address the others resolve at
  different times. This belongs to the incident of the server: for two minutes it is neither counted
  nor an event.

Each attempt has its own session and process group, whose processes have all ended before the next
attempt: a child of the task would hold its port. The guard is the init process of its container,
and reaps orphans of the task.
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
# In a shorter attempt than the first number, the cluster was not yet complete. The restarts go on
# up to the second, which is longer than gRPC takes to resolve a name again
# (DNS_MIN_TIME_BETWEEN_RESOLUTIONS: 30 s).
SHORT_ATTEMPT_SECONDS, SETTLE_SECONDS = 60.0, 120.0
# Seconds between two attempts; the starts of short attempts are this far apart, then twice as far
# each time, up to the second number.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 10.0
_MOST_DOUBLINGS = 10
# How long killed children of a task may take to exit.
GROUP_SECONDS = 10.0
_POLL_SECONDS = 0.01
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class NextAttempt(NamedTuple):
    """The decision to restart a task: the pause in seconds, and whether it counts as a restart."""

    pause: float
    is_counted: bool


class RestartRule:
    """Decides whether an ended task is restarted; `restarts` is the count in this pod."""

    def __init__(self, limit: float) -> None:
        """Allow `limit` counted restarts."""
        self.restarts = 0
        self._limit = limit
        # Consecutive short attempts, and their total seconds including the pauses after them.
        self._short, self._seconds = 0, 0.0

    def next_attempt(self, code: int, seconds: float) -> NextAttempt | None:
        """Decide after an attempt of `seconds`; None if its end is final."""
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
    """The process of one task; the main thread starts its attempts and waits for them.

    Signal handlers interrupt the main thread anywhere: the lock is reentrant, and a pipe wakes it.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], *, name: str, rule: RestartRule
    ) -> None:
        """Take the command of the task `name`, run by `start`."""
        self._name, self._rule = name, rule
        self._command = command
        # Outside of a container nothing else ends the task if the guard is killed.
        self._environment = {**environment, **signals.parent_environment()}
        self._lock = threading.RLock()
        self._is_ending = False
        self._woken, self._waker = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def send_signal(self, number: int) -> None:
        """Forward a signal to the task, which is not restarted after it."""
        self.begin_no_more()
        with self._lock:
            # The main thread has not reaped it, so no other process has its PID.
            if self._process:
                os.kill(self._process.pid, number)

    def begin_no_more(self) -> None:
        """Make this attempt the last one; end a pause at once."""
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
            # Reported at once: the launcher counts the first end as the incident.
            self._report(code, following)
            # Readable after `begin_no_more`.
            if select.select([self._woken], [], [], following.pause)[0]:
                return code
            termination.remove(Path.cwd())
            try:
                self.start()
            except OSError as error:
                log.warning("cannot restart %s: %s", self._name, error)
                return code

    def start(self) -> None:
        """Start an attempt; end it at once if it was asked to stop before. Raises `OSError`."""
        with self._lock:
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True
            )
        # A handler that ran meanwhile has found no process.
        if self._is_ending:
            self.send_signal(signal.SIGTERM)

    def _end(self) -> tuple[int, float]:
        """Wait for the end of the attempt and its process group; return its code and seconds."""
        process = self._process
        assert process
        _await_end(process.pid)
        seconds = time.monotonic() - self._began
        # Until the process is reaped, no other process group has its number.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with self._lock:
            self._process = None
            code = process.wait()
        _await_group(process.pid)
        return (code if code >= 0 else 128 - code), seconds

    def _report(self, code: int, following: NextAttempt) -> None:
        if not following.is_counted:
            log.warning("lost the cluster during startup: starting a new attempt in this pod")
            return
        events.emit(
            events.Restart(
                task=self._name, cause=describe_exit(code), restarts=self._rule.restarts, code=code
            )
        )


def adopt_orphans() -> None:
    """Become the reaper of the task's orphans if the containers share a PID namespace."""
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
    """Return when all processes of a killed group have ended."""
    until = time.monotonic() + GROUP_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            with suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            os.killpg(group, 0)
            time.sleep(_POLL_SECONDS)
        log.warning("child processes of the task are still running after SIGKILL")
