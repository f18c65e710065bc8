"""The first process of a trainer's pod: runs the task and forwards signals to it.

Usage: python -m flotilla.components.kubernetes.pods.guard -- python -m flotilla.trainer task ...

The guard writes the configuration to a file, from which the task reads it, and restarts the task
inside its pod (`task_process`). In the leading task's pod, it watches the launcher. In workers and
servers, it delays SIGTERM until the leading task has ended (`shutdown`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.pods.shutdown import (
    Ending,
    Shutdown,
    delete_job,
    watch_launcher,
)
from flotilla.components.kubernetes.pods.task_process import RestartRule, TaskProcess, adopt_orphans
from flotilla.components.kubernetes.pods.template import (
    CONFIG_FILE,
    CONFIG_VARIABLE,
    LAUNCHER_VARIABLE,
    grace_seconds,
)
from flotilla.trainer.cluster import termination
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config, leader
from flotilla.trainer.runtime import signals, streams
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import DONE, FAILED, USAGE, ConfigError, UserError
from flotilla.trainer.runtime.threads import Loop

log = logging.getLogger(__name__)
# A task is killed before its pod's grace period ends, so that the guard can still write the
# termination message: this many seconds earlier, or this share of a short grace period.
KILL_SECONDS, KILL_SHARE = 10.0, 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds until unresolved names are reported (a name resolves only once its pod has an address),
# and seconds between two lookups.
NAMES_SECONDS, LOOK_SECONDS = 90.0, 10.0


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
