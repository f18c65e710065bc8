"""The first process of every pod: writes the configuration, runs the task, forwards its signals.

    python -m components.tfjob.guard -- python -m trainer task ...

Next to the leading task it also watches the launcher's heartbeat, an annotation on the job. When
the heartbeat stops, the job is an orphan: the guard ends training with a last checkpoint, and the
job with it. An API that cannot be reached does not prove that the launcher is gone: only time
during which the heartbeat could be read, and did not change, counts.

The guard of a parameter server or worker delays SIGTERM until the leading task has ended; see
`components.tfjob.shutdown`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType

from components.tfjob import names
from components.tfjob.manifest import CONFIG_FILE, CONFIG_VARIABLE, LAUNCHER_VARIABLE
from components.tfjob.shutdown import NOTICE_SECONDS, ShutdownConnection, ShutdownServer
from trainer.cluster import termination
from trainer.errors import FAILED, USAGE, UserError
from trainer.topology import Cluster, Task, from_tf_config, leader

log = logging.getLogger(__name__)
# How often the heartbeat is read before the job counts as an orphan.
READS_PER_LIMIT = 10
# A task that has not ended so long after SIGTERM is killed; below the grace period of the pod.
TERM_SECONDS = 110.0
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
    """The process of one task."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start the task."""
        #: Why the task was ended; empty unless the launcher is gone.
        self.orphaned = ""
        self._process = subprocess.Popen(command, env=dict(environment))

    def send_signal(self, number: int) -> None:
        """Forward a signal to the task."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end_orphan(self, reason: str) -> None:
        """End the task with a last checkpoint, and the guard with a code that fails the job."""
        self.orphaned = reason
        self.send_signal(signal.SIGTERM)
        killer = threading.Timer(TERM_SECONDS, self.send_signal, (signal.SIGKILL,))
        killer.daemon = True
        killer.start()

    def wait(self) -> int:
        """Return the exit code of the task: 128 and its number for a signal."""
        code = self._process.wait()
        if self.orphaned:
            folder = Path.cwd()
            termination.write(folder, f"{self.orphaned}; {termination.read(folder)}")
            return FAILED
        return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    """Run the command after `--`, and return its exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    if arguments[:1] != ["--"] or not arguments[1:]:
        sys.stderr.write("guard: usage: python -m components.tfjob.guard -- COMMAND\n")
        return USAGE
    environment = dict(os.environ)
    config = environment.pop(CONFIG_VARIABLE, "")
    try:
        if config:
            Path(CONFIG_FILE).write_text(config, encoding="utf-8")
        guard = Guard(arguments[1:], environment)
    except OSError as error:
        what = error.filename or arguments[1]
        sys.stderr.write(f"guard: cannot start in {Path.cwd()}: {what}: {error.strerror}\n")
        return FAILED
    cluster, task = _parse_tf_config(environment.get("TF_CONFIG", ""))
    leads = cluster is not None and task == leader(cluster)
    _handle_signals(guard, cluster, task)
    watched = json.loads(environment.get(LAUNCHER_VARIABLE) or "{}") if leads else {}
    if watched:
        threading.Thread(target=_watch_heartbeat, args=(guard, watched), daemon=True).start()
    code = guard.wait()
    if guard.orphaned:
        _delete_job(watched)
    return code


def _parse_tf_config(text: str) -> tuple[Cluster, Task] | tuple[None, None]:
    """Return the cluster and this task; None where TF_CONFIG is wrong, which the task reports."""
    try:
        return from_tf_config(text)
    except UserError:
        return None, None


def _handle_signals(guard: Guard, cluster: Cluster | None, task: Task | None) -> None:
    """Forward signals to the task; to a server only when its leader has ended."""
    server = ShutdownServer() if cluster and task == leader(cluster) else None
    connection = None
    if cluster and task and not server and task.role in ("ps", "worker"):
        host, _, _ = cluster.address(leader(cluster)).rpartition(":")
        connection = ShutdownConnection(host)

    def handle(number: int, _frame: FrameType | None) -> None:
        if connection:
            ending = (guard, connection)
            threading.Thread(target=_end_after_leader, args=ending, daemon=True).start()
            return
        if server:
            server.announce()
        guard.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, handle)


def _end_after_leader(guard: Guard, connection: ShutdownConnection) -> None:
    connection.wait(NOTICE_SECONDS, TERM_SECONDS)
    guard.send_signal(signal.SIGTERM)


def _watch_heartbeat(guard: Guard, watched: Mapping[str, str]) -> None:
    """End the task when the launcher's heartbeat is older than the limit."""
    # Imported here since it is slow, and the task must not wait for it.
    from components.tfjob.client import Api, RefusedError, UnreachableError, connect

    limit = float(watched["seconds"])
    age = HeartbeatAge()
    try:
        api = Api(connect(), watched["namespace"])
    except UserError as error:
        log.warning("the launcher is not watched: %s", error)
        return
    while True:
        try:
            metadata = api.get_job(watched["job"])["metadata"]
            heartbeat = metadata.get("annotations", {}).get(names.HEARTBEAT, "")
            if not heartbeat:
                log.info("the job has no heartbeat: its launcher is not watched")
                return
            if age.read(heartbeat) >= limit:
                reason = f"no heartbeat of the launcher for {limit:g} s"
                log.warning("%s: training ends", reason)
                guard.end_orphan(reason)
                return
        except RefusedError as error:
            log.warning("the launcher is not watched: %s", error)
            return
        except UnreachableError:
            age.unreadable()
        time.sleep(limit / READS_PER_LIMIT)


def _delete_job(watched: Mapping[str, str]) -> None:
    """Delete the job if that is permitted; otherwise the failure of its leader ends it."""
    from components.tfjob.client import Api, RefusedError, UnreachableError, connect

    with suppress(UserError, RefusedError, UnreachableError):
        Api(connect(), watched["namespace"]).delete_job(watched["job"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
