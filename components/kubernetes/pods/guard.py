"""The first process of a trainer's pod: runs the task and forwards signals to it.

Usage: python -m flotilla.components.kubernetes.pods.guard -- python -m flotilla.trainer task ...

The guard writes the configuration to a file, from which the task reads it, and restarts the task
inside its pod. In the leading task's pod, it watches the launcher. In workers and servers, it
delays SIGTERM until the leading task has ended (`shutdown`).

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
import json
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.pods.pod_state import describe_exit
from flotilla.components.kubernetes.pods.shutdown import (
    Ending,
    Shutdown,
    delete_job,
    watch_launcher,
)
from flotilla.components.kubernetes.pods.template import (
    CONFIG_FILE,
    CONFIG_VARIABLE,
    LAUNCHER_VARIABLE,
    grace_seconds,
)
from flotilla.trainer import events
from flotilla.trainer.cluster import termination
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config, leader
from flotilla.trainer.runtime import signals, streams
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import (
    BEGIN_AGAIN,
    DONE,
    FAILED,
    RETRYABLE,
    USAGE,
    ConfigError,
    UserError,
)
from flotilla.trainer.runtime.loop import Loop

log = logging.getLogger(__name__)
# A task is killed before its pod's grace period ends, so that the guard can still write the
# termination message: this many seconds earlier, or this share of a short grace period.
KILL_SECONDS, KILL_SHARE = 10.0, 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds until unresolved names are reported (a name resolves only once its pod has an address),
# and seconds between two lookups.
NAMES_SECONDS, LOOK_SECONDS = 90.0, 10.0
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


class Guard:
    """Forwards signals to a task. If `ends_job` is true, the guard also ends the whole job."""

    def __init__(self, process: TaskProcess, grace: float) -> None:
        """Store the process, which has `grace` seconds from SIGTERM to SIGKILL."""
        self.ends_job = False
        self.term_seconds = grace - min(KILL_SECONDS, KILL_SHARE * grace)
        self._reason = ""
        self._process = process
        self._sent: dict[int, object] = {}

    def send_signal(self, number: int) -> None:
        """Forward a signal to the task, and do not restart the task afterwards.

        Each signal is forwarded only once, because a second one would end the task without a last
        checkpoint. If a job is suspended and also asked to stop, two signals arrive.
        """
        mine = object()
        # `setdefault` is atomic, so the signal handler and the launcher watch cannot both send it.
        if self._sent.setdefault(number, mine) is mine:
            self._process.send_signal(number)

    def end_job(self, reason: str) -> None:
        """End the task with a last checkpoint. Its termination message includes the reason."""
        self.ends_job, self._reason = True, reason
        self.send_signal(signal.SIGTERM)
        killer = threading.Timer(self.term_seconds, self.send_signal, (signal.SIGKILL,))
        killer.daemon = True
        killer.start()

    def wait(self) -> int:
        """Return the task's exit code (128 + N for signal N), or FAILED to make the job fail."""
        code = self._process.wait()
        if not self.ends_job:
            return code
        if self._reason:
            folder = Path.cwd()
            termination.write(folder, f"{self._reason}; {termination.read(folder)}")
        return DONE if code == DONE and not self._reason else FAILED


class PeerNames:
    """Reports names of other tasks that do not resolve. TensorFlow waits for them silently.

    If a Service with the job's name already exists and belongs to something else, no name resolves,
    and no Kubernetes event reports it.
    """

    def __init__(
        self,
        cluster: Cluster,
        resolve: Callable[[str, int], object] = socket.getaddrinfo,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the names. `resolve` looks a name up, and raises an `OSError` if it is unknown."""
        every = [each for role in sorted(cluster.addresses) for each in cluster.addresses[role]]
        self._left = [each.rpartition(":")[0] for each in every]
        self._resolve, self._clock = resolve, clock
        self._began, self._said = clock(), ""

    def look(self) -> bool:
        """Look up the names that have not resolved yet, and return whether any are left."""
        self._left = [name for name in self._left if not self._has_address(name)]
        line = self._said
        if self._left and self._clock() - self._began >= NAMES_SECONDS:
            line = f"{names.UNRESOLVED}{', '.join(self._left)}"
        elif not self._left and self._said:
            line = names.RESOLVED
        if line != self._said:
            log.warning(line)
        self._said = line
        return bool(self._left)

    def _has_address(self, name: str) -> bool:
        try:
            self._resolve(name, 0)
        except OSError:
            return False
        return True


def main(arguments: list[str]) -> int:
    """Run the command after `--`, and return its exit code."""
    streams.log_to_stderr()
    if arguments[:1] != ["--"] or not arguments[1:]:
        streams.say("guard: usage: python -m flotilla.components.kubernetes.pods.guard -- COMMAND")
        return USAGE
    try:
        check_variables()
    except ConfigError as error:
        streams.say(f"guard: {error}")
        return USAGE
    signals.end_with_parent()
    adopt_orphans()
    environment = dict(os.environ)
    config = environment.pop(CONFIG_VARIABLE, "")
    cluster, task = _parse_tf_config(environment.get("TF_CONFIG", ""))
    settings = _parse_config(config)
    process = TaskProcess(
        arguments[1:],
        environment,
        name=str(task or "the task"),
        rule=RestartRule(_restart_limit(settings, task)),
    )
    guard = Guard(process, grace_seconds(settings, task.role if task else "worker"))
    leads = cluster is not None and task == leader(cluster)
    # Set the handlers before the task starts, so that every signal reaches the task.
    _handle_signals(guard, process, cluster, task)
    try:
        if config:
            Path(CONFIG_FILE).write_text(config, encoding="utf-8")
        process.start()
    except OSError as error:
        what = error.filename or arguments[1]
        streams.say(f"guard: cannot start the task in {Path.cwd()}: {what}: {error.strerror}")
        return FAILED
    watched = watch_as_leader(guard, cluster, environment) if leads and cluster else {}
    code = guard.wait()
    if guard.ends_job:
        delete_job(watched)
    return code


def watch_as_leader(
    ending: Ending, cluster: Cluster, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Watch the launcher and the names of the other tasks. Return the parsed launcher variable."""
    watched: dict[str, Any] = json.loads(environment.get(LAUNCHER_VARIABLE) or "{}")
    if watched:
        threading.Thread(target=watch_launcher, args=(ending, watched), daemon=True).start()
    look = PeerNames(cluster).look
    Loop(look, LOOK_SECONDS, name="names", failing="cannot check the task names").start()
    return watched


def _parse_tf_config(text: str) -> tuple[Cluster, Task] | tuple[None, None]:
    try:
        return from_tf_config(text)
    except UserError:
        return None, None


def _parse_config(text: str) -> Config:
    """Return the configuration, or the defaults if it is invalid. The task reports the error."""
    with suppress(UserError, ValueError):
        return parse_config(json.loads(text))
    return Config()


def _restart_limit(config: Config, task: Task | None) -> float:
    role = task.role if task else "worker"
    if config.cluster.kubernetes.of(role).restart_policy == "Never":
        return 0
    # Training does not depend on the evaluator, so its restarts are not limited.
    return math.inf if role == "evaluator" else config.cluster.max_restarts


def _handle_signals(
    guard: Guard, process: TaskProcess, cluster: Cluster | None, task: Task | None
) -> None:
    shutdown = Shutdown(cluster, task) if cluster and task else None

    def handle(number: int, _frame: FrameType | None) -> None:
        if shutdown:
            shutdown.take(number, process.begin_no_more, guard.send_signal, guard.term_seconds)
        else:
            guard.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, handle)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
