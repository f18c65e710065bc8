"""The process of a task, which is restarted in its pod after it was killed or lost its cluster.

A process that is restarted in its pod keeps its address. The other tasks would resolve the address
of a new pod up to 30 s later, and Kubernetes' back-off would grow each time.

`RestartRule` decides by the exit code of the task:

- A code below 128 is final: it means success, or a failure that would repeat.
- From 128 on (a signal, or `BEGIN_AGAIN`), the task is restarted, up to a limit for this pod. Each
  of these restarts is logged as an event. Past the limit, the guard exits with the code of the
  task, and the pod's controller decides whether to recreate the pod.
- If a task ends with `BEGIN_AGAIN` soon after its start, its cluster was not complete yet: for
  example, a server had restarted, and the other tasks resolve its new address at different times.
  For two minutes, these restarts are neither counted nor logged as events, because they belong to
  the incident of the server.

Each attempt has its own session and process group. All processes of the group must end before the
next attempt, because a child of the task could hold its port. The guard is the init process of its
container, and reaps orphans of the task.
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
# An attempt that ends with `BEGIN_AGAIN` before SHORT_ATTEMPT_SECONDS had an incomplete cluster.
# Its restart is not counted during SETTLE_SECONDS. This exceeds the time that gRPC waits before it
# resolves a name again (DNS_MIN_TIME_BETWEEN_RESOLUTIONS: 30 s).
SHORT_ATTEMPT_SECONDS, SETTLE_SECONDS = 60.0, 120.0
# Minimum pause between two attempts. After consecutive short attempts, the time between two starts
# doubles from PAUSE_SECONDS up to LONGEST_PAUSE_SECONDS.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 10.0
_MOST_DOUBLINGS = 10
# How long killed children of a task may take to exit, in seconds.
GROUP_SECONDS = 10.0
_POLL_SECONDS = 0.01
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


class NextAttempt(NamedTuple):
    """The decision to restart a task: the pause in seconds, and whether the restart is counted."""

    pause: float
    is_counted: bool


class RestartRule:
    """Decides whether to restart an ended task. `restarts` counts the restarts in this pod."""

    def __init__(self, limit: float) -> None:
        """Allow `limit` counted restarts."""
        self.restarts = 0
        self._limit = limit
        # Number of consecutive short attempts, and their total seconds including the pauses.
        self._short, self._seconds = 0, 0.0

    def next_attempt(self, code: int, seconds: float) -> NextAttempt | None:
        """Return how to restart a task that ended after `seconds`, or None for no restart."""
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
    """The process of one task. The main thread starts its attempts and waits for them.

    Signal handlers may interrupt the main thread anywhere. Therefore the lock is reentrant, and a
    pipe wakes the thread.
    """

    def __init__(
        self, command: list[str], environment: Mapping[str, str], *, name: str, rule: RestartRule
    ) -> None:
        """Store the command of the task `name`. `start` runs it."""
        self._name, self._rule = name, rule
        self._command = command
        # End the task if the guard is killed. Outside a container, nothing else would do so.
        self._environment = {**environment, **signals.parent_environment()}
        self._lock = threading.RLock()
        self._is_ending = False
        self._woken, self._waker = os.pipe()
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0

    def send_signal(self, number: int) -> None:
        """Forward a signal to the task, and do not restart the task afterwards."""
        self.begin_no_more()
        with self._lock:
            # While `_process` is set, it has not been reaped, so no other process has its PID.
            if self._process:
                os.kill(self._process.pid, number)

    def begin_no_more(self) -> None:
        """Do not restart the task after its current attempt, and end any pause before a restart."""
        if not self._is_ending:
            self._is_ending = True
            os.write(self._waker, b"\0")

    def wait(self) -> int:
        """Wait for the last attempt, and return its exit code: 128 + N for signal N."""
        while True:
            code, seconds = self._end()
            following = None if self._is_ending else self._rule.next_attempt(code, seconds)
            if following is None:
                return code
            # Report the restart before the pause. The launcher counts only the first restart that
            # it reads, and considers the restarts of other tasks consequences of the first one.
            self._report(code, following)
            # The pipe becomes readable after `begin_no_more`.
            if select.select([self._woken], [], [], following.pause)[0]:
                return code
            termination.remove(Path.cwd())
            try:
                self.start()
            except OSError as error:
                log.warning("cannot restart %s: %s", self._name, error)
                return code

    def start(self) -> None:
        """Start an attempt. End it if a stop was already requested. Raises `OSError`."""
        with self._lock:
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                self._command, env=self._environment, start_new_session=True
            )
        # A signal handler that ran before this point found no process, so send the signal now.
        if self._is_ending:
            self.send_signal(signal.SIGTERM)

    def _end(self) -> tuple[int, float]:
        """Wait until the attempt and its process group end. Return its exit code and duration."""
        process = self._process
        assert process
        _await_end(process.pid)
        seconds = time.monotonic() - self._began
        # The process is not reaped yet, so no other process group can have this id.
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with self._lock:
            self._process = None
            code = process.wait()
        _await_group(process.pid)
        return (code if code >= 0 else 128 - code), seconds

    def _report(self, code: int, following: NextAttempt) -> None:
        if not following.is_counted:
            log.warning("%s lost the cluster during startup; restarting it in its pod", self._name)
            return
        events.emit(
            events.Restart(
                task=self._name, cause=describe_exit(code), restarts=self._rule.restarts, code=code
            )
        )


def adopt_orphans() -> None:
    """Make this process reap the task's orphans, even if the containers share a PID namespace."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _await_end(pid: int) -> None:
    """Wait until a child has ended, without reaping it. Reap orphans until then."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_pid == pid:
            continue
        if os.getsid(ended.si_pid) != os.getsid(0):
            os.waitpid(ended.si_pid, os.WNOHANG)
            continue
        # Do not reap this child, because another thread of the guard waits for it.
        time.sleep(_POLL_SECONDS)


def _await_group(group: int) -> None:
    until = time.monotonic() + GROUP_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < until:
            with suppress(ChildProcessError):
                while os.waitpid(-group, os.WNOHANG)[0]:
                    pass
            os.killpg(group, 0)
            time.sleep(_POLL_SECONDS)
        log.warning("child processes of the task are still running after SIGKILL")
