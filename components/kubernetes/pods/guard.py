"""The first process of every pod: writes the configuration, runs the task, forwards its signals.

    python -m components.kubernetes.pods.guard -- python -m trainer task ...

Next to the leading task it also watches the job. Where the launcher asks for a stop, or its
heartbeat stops, the guard ends training with a last checkpoint, and the job with it.

The heartbeat is an annotation on the job; a job whose heartbeat stops is an orphan. An API that
cannot be reached does not prove that the launcher is gone: only time during which the heartbeat
could be read, and did not change, counts. A heartbeat that was never renewed proves nothing either:
its launcher may not be able to. Such a launcher ends the job itself within the limit, so that the
guard waits for twice the limit, and then finds only a job whose launcher died in between.

A task that is killed, or begins again because another one was lost, is started again in its pod, up
to `cluster.max_restarts` times; see `components.kubernetes.pods.task_process`.

The guard of a parameter server or worker delays SIGTERM until the leading task has ended; see
`components.kubernetes.pods.shutdown`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from components.kubernetes import names
from components.kubernetes.names import Tree
from components.kubernetes.pods.shutdown import NOTICE_SECONDS, ShutdownConnection, ShutdownServer
from components.kubernetes.pods.task_process import RestartRule, TaskProcess, adopt_orphans
from components.tfjob.manifest import (
    CONFIG_FILE,
    CONFIG_VARIABLE,
    GRACE_SECONDS,
    LAUNCHER_VARIABLE,
)
from trainer import masking, variables
from trainer.cluster import signals, termination
from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.errors import DONE, FAILED, USAGE, ConfigError, UserError
from trainer.topology import Cluster, Task, from_tf_config, leader

if TYPE_CHECKING:
    from components.kubernetes.api.client import Api

log = logging.getLogger(__name__)
# How often the heartbeat is read before the job counts as an orphan.
READS_PER_LIMIT = 10
# A launcher that has not renewed its first heartbeat after one limit has ended the job itself.
UNRENEWED_LIMITS = 2
# A task that has not ended so long before the end of the grace period of its pod is killed, in time
# for its termination message; of a short grace period it is this share.
KILL_SECONDS, KILL_SHARE = 10.0, 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class HeartbeatAge:
    """How many seconds the heartbeat has been the same, counted while it could be read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Take a monotonic clock."""
        self._clock = clock
        self._heartbeat = ""
        self._read_at: float | None = None
        self._seconds = 0.0

    def read(self, heartbeat: str) -> float:
        """Take the heartbeat that was read now, and return its age in seconds."""
        now = self._clock()
        if heartbeat != self._heartbeat:
            self._heartbeat, self._seconds = heartbeat, 0.0
        elif self._read_at is not None:
            self._seconds += now - self._read_at
        self._read_at = now
        return self._seconds

    def unreadable(self) -> None:
        """Pause: the time until the heartbeat can be read again does not count."""
        self._read_at = None


class Guard:
    """The end of one task, and of the job where that is asked for.

    Attributes:
        ends_job: whether the job ends with the task, which was asked to end for the job's sake.
    """

    def __init__(self, process: TaskProcess, grace: float) -> None:
        """Take the process, which has `grace` seconds from SIGTERM to SIGKILL."""
        self.ends_job = False
        self.term_seconds = grace - min(KILL_SECONDS, KILL_SHARE * grace)
        self._reason = ""
        self._process = process

    def send_signal(self, number: int) -> None:
        """Forward a signal to the task, which is not started again after it."""
        self._process.send_signal(number)

    def begin_no_more(self) -> None:
        """Leave the task as it is, and do not start it again."""
        self._process.begin_no_more()

    def end_job(self, reason: str) -> None:
        """End the task with a last checkpoint; a reason is part of its termination message."""
        self.ends_job, self._reason = True, reason
        self.send_signal(signal.SIGTERM)
        killer = threading.Timer(self.term_seconds, self.send_signal, (signal.SIGKILL,))
        killer.daemon = True
        killer.start()

    def wait(self) -> int:
        """Return the exit code of the task: 128 and its number for a signal.

        It is one that fails the job where the job ends with the task: from 128 on the operator
        would start it again.
        """
        code = self._process.wait()
        if not self.ends_job:
            return code
        if self._reason:
            folder = Path.cwd()
            termination.write(folder, f"{self._reason}; {termination.read(folder)}")
        return DONE if code == DONE and not self._reason else FAILED


def main(arguments: list[str]) -> int:
    """Run the command after `--`, and return its exit code."""
    masking.log_to_stderr()
    if arguments[:1] != ["--"] or not arguments[1:]:
        sys.stderr.write("guard: usage: python -m components.kubernetes.pods.guard -- COMMAND\n")
        return USAGE
    try:
        variables.check()
    except ConfigError as error:
        sys.stderr.write(f"guard: {error}\n")
        return USAGE
    signals.end_with_parent()
    adopt_orphans()
    environment = dict(os.environ)
    config = environment.pop(CONFIG_VARIABLE, "")
    cluster, task = _parse_tf_config(environment.get("TF_CONFIG", ""))
    try:
        if config:
            Path(CONFIG_FILE).write_text(config, encoding="utf-8")
        settings = _parse_config(config)
        process = TaskProcess(
            arguments[1:],
            environment,
            name=str(task or "the task"),
            rule=RestartRule(_restart_limit(settings, task)),
        )
    except OSError as error:
        what = error.filename or arguments[1]
        sys.stderr.write(f"guard: cannot start in {Path.cwd()}: {what}: {error.strerror}\n")
        return FAILED
    guard = Guard(process, _grace_seconds(settings, task))
    leads = cluster is not None and task == leader(cluster)
    _handle_signals(guard, cluster, task)
    watched = json.loads(environment.get(LAUNCHER_VARIABLE) or "{}") if leads else {}
    if watched:
        threading.Thread(target=_watch_launcher, args=(guard, watched), daemon=True).start()
    code = guard.wait()
    if guard.ends_job:
        _delete_job(watched)
    return code


def _parse_tf_config(text: str) -> tuple[Cluster, Task] | tuple[None, None]:
    """Return the cluster and this task; None where TF_CONFIG is wrong, which the task reports."""
    try:
        return from_tf_config(text)
    except UserError:
        return None, None


def _parse_config(text: str) -> Config:
    """Return the configuration; the defaults where it is wrong, which the task reports."""
    with suppress(UserError, ValueError):
        return parse_config(json.loads(text))
    return Config()


def _grace_seconds(config: Config, task: Task | None) -> float:
    """Return the grace period of the pod of this task, as the manifest has it."""
    settings = config.cluster.kubernetes.of(task.role if task else "worker")
    return float(settings.grace_seconds or GRACE_SECONDS)


def _restart_limit(config: Config, task: Task | None) -> float:
    """Return how often this task begins again in its pod."""
    role = task.role if task else "worker"
    if config.cluster.kubernetes.of(role).restart_policy == "Never":
        return 0
    # Training does not depend on the evaluator.
    return math.inf if role == "evaluator" else config.cluster.max_restarts


def _handle_signals(guard: Guard, cluster: Cluster | None, task: Task | None) -> None:
    """Forward signals to the task; to a server only when its leader has ended."""
    server = None
    if cluster and task == leader(cluster):
        server = ShutdownServer(cluster.count("ps") + cluster.count("worker"))
    connection = None
    if cluster and task and not server and task.role in ("ps", "worker"):
        host, _, _ = cluster.address(leader(cluster)).rpartition(":")
        connection = ShutdownConnection(host)

    def handle(number: int, _frame: FrameType | None) -> None:
        if connection:
            # What the leader saves is gone with the process that held it.
            guard.begin_no_more()
            ending = (guard, connection)
            threading.Thread(target=_end_after_leader, args=ending, daemon=True).start()
            return
        if server:
            server.announce()
        guard.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, handle)


def _end_after_leader(guard: Guard, connection: ShutdownConnection) -> None:
    connection.wait(NOTICE_SECONDS, guard.term_seconds)
    guard.send_signal(signal.SIGTERM)


def _watch_launcher(guard: Guard, watched: Mapping[str, str]) -> None:
    """End the task when the launcher asks for it, or is gone."""
    # Imported here since it is slow, and the task must not wait for it.
    from components.kubernetes.api.client import Api, connect

    try:
        api = Api(connect(), watched["namespace"])
    except UserError as error:
        log.warning("the launcher is not watched: %s", error)
        return
    _watch_for_stop(guard, api, watched["job"])
    _watch_heartbeat(guard, api, watched)


def _watch_for_stop(guard: Guard, api: Api, job: str) -> None:
    """Start a thread that ends the task as soon as the job has the annotation for it."""
    from components.kubernetes.api.watch import Watch

    def see(item: Tree, deleted: bool) -> None:
        if not deleted and names.STOP in (item["metadata"].get("annotations") or {}):
            watch.stopped.set()
            log.warning(names.STOPPING)
            guard.end_job("")

    def refuse(error: Exception) -> None:
        log.warning("a cancel ends this job at once, perhaps without a last checkpoint: %s", error)

    watch = Watch(api, names.PLURAL, {"fieldSelector": f"metadata.name={job}"}, see, refuse)
    watch.start()


def _watch_heartbeat(guard: Guard, api: Api, watched: Mapping[str, str]) -> None:
    """End the task when the launcher's heartbeat is older than the limit."""
    from components.kubernetes.api.client import RefusedError, UnreachableError

    limit = float(watched["seconds"])
    age = HeartbeatAge()
    while True:
        try:
            metadata = api.get_job(watched["job"])["metadata"]
            heartbeat = (metadata.get("annotations") or {}).get(names.HEARTBEAT, "")
            if not heartbeat:
                log.info("the job has no heartbeat: its launcher is not watched")
                return
            limits = 1 if names.is_renewed(heartbeat) else UNRENEWED_LIMITS
            if age.read(heartbeat) >= limits * limit:
                reason = f"no heartbeat of the launcher for {limits * limit:g} s"
                log.warning("%s: training ends", reason)
                guard.end_job(reason)
                return
        except RefusedError as error:
            if error.is_missing:
                # Its pods are deleted with it.
                log.info("the job is gone: its launcher is not watched any more")
                return
            if error.code == HTTPStatus.FORBIDDEN:
                log.warning("the launcher is not watched: %s", error)
                return
            age.unreadable()
        except UnreachableError:
            age.unreadable()
        time.sleep(limit / READS_PER_LIMIT)


def _delete_job(watched: Mapping[str, str]) -> None:
    """Delete the job if that is permitted; otherwise the failure of its leader ends it."""
    from components.kubernetes.api.client import Api, RefusedError, UnreachableError, connect

    with suppress(UserError, RefusedError, UnreachableError):
        Api(connect(), watched["namespace"]).delete_job(watched["job"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
