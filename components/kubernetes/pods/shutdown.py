"""How a pod learns that it must end: from the launcher's lease, and from the leading task.

The leading task's pod watches the launcher through the lease of the job. An annotation on the lease
asks it to end the job. If the lease is not renewed in time, the launcher is considered dead, and
the job ends. Time in which the lease cannot be read does not count. If the lease was never renewed,
the limit is twice as long, because a launcher that cannot renew its lease ends the job itself. A
job without a lease is never ended, because no launcher has created such a job.

Servers end after the leading task, which saves their variables. Kubernetes sends SIGTERM to all
pods of a job at the same time. Therefore the leader's pod accepts a connection from the pod of
every worker and server. A byte announces the leader's shutdown, and the end of the connection means
that the leader has ended. Until then, a server keeps running. Without an announcement, the server
ends after `NOTICE_SECONDS`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.names import LEASES, Resource, Tree
from flotilla.trainer import events
from flotilla.trainer.config.topology import Cluster, Task, leader
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.loop import Loop

log = logging.getLogger(__name__)
_PORT_VARIABLE = "FLOTILLA_GUARD_PORT"
# The guard reports a value that is not a number as an error, so use the default here.
_named_port = os.environ.get(_PORT_VARIABLE, "")
PORT = int(_named_port) if _named_port.isdecimal() else 2223
_SHUTTING_DOWN = b"e"
# After SIGTERM, a server waits this many seconds for the announcement, which comes only if the
# leader is stopped too.
NOTICE_SECONDS = 5.0
CONNECT_SECONDS = 2.0
# Number of connections that are allowed beyond one for each server.
SPARE = 8
# Number of times that the lease is read within the heartbeat limit.
READS_PER_LIMIT = 10
# If the lease was never renewed, the guard waits for this multiple of the limit. A launcher that is
# alive ends such a job itself within one limit.
UNRENEWED_LIMITS = 2


class ShutdownServer:
    """The leader's side: accepts a connection from every server.

    Any process that reaches the port can open connections. If there are more than `SPARE` extra
    connections, the oldest one of the address with the most connections is closed.
    """

    def __init__(self, servers: int, port: int = PORT) -> None:
        """Listen on `port`. If it is taken, servers end without waiting for the leader."""
        self._limit = servers + SPARE
        # The address of each peer, oldest connection first.
        self._connections: dict[socket.socket, str] = {}
        self._shutting_down = False
        with suppress(OSError):
            self._server = socket.create_server(("", port), backlog=self._limit)
            threading.Thread(target=self._accept, name="shutdown-server", daemon=True).start()

    def announce(self) -> None:
        """Announce to all servers that the leader is shutting down."""
        self._shutting_down = True
        for connection in list(self._connections):
            _announce(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._server.accept()
                _expect_end(connection)
            except OSError:
                # The peer has disconnected, or this process has no free file descriptor.
                time.sleep(CONNECT_SECONDS / 2)
                continue
            self._make_room()
            self._connections[connection] = host
            if self._shutting_down:
                _announce(connection)

    def _make_room(self) -> None:
        for connection in [each for each in self._connections if _has_ended(each)]:
            self._close(connection)
        if len(self._connections) >= self._limit:
            ((crowded, _),) = Counter(self._connections.values()).most_common(1)
            self._close(next(each for each, host in self._connections.items() if host == crowded))

    def _close(self, connection: socket.socket) -> None:
        del self._connections[connection]
        connection.close()


class ShutdownConnection:
    """The server's side: one connection to the leader, reopened if it is lost."""

    def __init__(self, host: str, port: int = PORT) -> None:
        """Connect, and reconnect whenever the connection is lost, in a daemon thread."""
        self._address = (host, port)
        self._announced = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._connect, name="shutdown-connection", daemon=True).start()

    def wait(self, notice: float, timeout: float) -> None:
        """Wait up to `notice` s for the announcement, then `timeout` s for the leader to end."""
        if self._announced.wait(notice):
            self._ended.wait(timeout)

    def _connect(self) -> None:
        while not self._ended.is_set():
            with (
                suppress(OSError),
                socket.create_connection(self._address, CONNECT_SECONDS) as connection,
            ):
                connection.settimeout(None)
                _expect_end(connection)
                if connection.recv(1) == _SHUTTING_DOWN:
                    self._announced.set()
                    with suppress(OSError):
                        connection.recv(1)
                    self._ended.set()
            time.sleep(CONNECT_SECONDS / 2)


class Shutdown:
    """Ends a pod's task after a stop request: a worker or server ends after the leading task."""

    def __init__(self, cluster: Cluster, task: Task) -> None:
        """Connect the pods of a job."""
        self._server: ShutdownServer | None = None
        self._connection: ShutdownConnection | None = None
        first = leader(cluster)
        if task == first:
            self._server = ShutdownServer(cluster.count("ps") + cluster.count("worker"))
        elif task.role in ("ps", "worker"):
            host, _, _ = cluster.address(first).rpartition(":")
            self._connection = ShutdownConnection(host)

    def announce(self) -> None:
        """If this is the leader, announce that it is shutting down."""
        if self._server:
            self._server.announce()

    def take(
        self,
        number: int,
        begin_no_more: Callable[[], None],
        send: Callable[[int], None],
        seconds: float,
    ) -> None:
        """Call `send` with a signal that the pod received, in a server after the leader's end.

        A server waits `seconds` for the leader. Until then, it is not restarted, because a new
        server would lack the variables that the leader saves.
        """
        self.announce()
        connection = self._connection
        if not connection:
            send(number)
            return
        begin_no_more()

        def end() -> None:
            connection.wait(NOTICE_SECONDS, seconds)
            send(signal.SIGTERM)

        threading.Thread(target=end, daemon=True).start()


def _announce(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.send(_SHUTTING_DOWN)


def _expect_end(connection: socket.socket) -> None:
    """Make the system detect within a minute that the peer is gone, even if nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Set only those options that this system supports.
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the peer has disconnected or has sent data, which no server does."""
    try:
        connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class Ending(Protocol):
    """An object that can end the job: a guard, or the `Reaction` of an agent."""

    def end_job(self, reason: str) -> None:
        """End the task and the job. The termination message includes the reason."""


class HeartbeatAge:
    """Measures for how many seconds the heartbeat has been readable without a change."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Store a monotonic clock."""
        self._clock = clock
        self._heartbeat = ""
        self._read_at: float | None = None
        self._seconds = 0.0

    def read(self, heartbeat: str) -> float:
        """Record the current heartbeat, and return its age in seconds."""
        now = self._clock()
        if heartbeat != self._heartbeat:
            self._heartbeat, self._seconds = heartbeat, 0.0
        elif self._read_at is not None:
            self._seconds += now - self._read_at
        self._read_at = now
        return self._seconds

    def unreadable(self) -> None:
        """Pause the measurement until the heartbeat is readable again."""
        self._read_at = None


def delete_job(watched: Mapping[str, Any]) -> None:
    """Try to delete the job. If this fails, the failure of the leading task ends the job."""
    from flotilla.components.kubernetes import client

    with suppress(UserError, client.RefusedError, client.UnreachableError):
        api = client.Api(client.connect(), watched["namespace"])
        api.delete(Resource(*watched["kind"]), watched["job"])


def watch_launcher(guard: Ending, watched: Mapping[str, Any]) -> None:
    """Watch the launcher of this job. `watched` is the parsed launcher variable."""
    # The import is slow, and the task must not wait for it.
    from flotilla.components.kubernetes.client import Api, connect

    try:
        api = Api(connect(), watched["namespace"])
    except UserError as error:
        events.emit(events.LauncherUnwatched(reason=str(error)))
        return
    _watch_for_stop(guard, api, watched["job"])
    limit = float(watched["seconds"])
    look = partial(_look, guard, api, watched["job"], limit, HeartbeatAge())
    if look():
        pause = limit / READS_PER_LIMIT
        failing = "cannot read the launcher's heartbeat"
        Loop(look, pause, name="launcher", failing=failing).start()


def _watch_for_stop(guard: Ending, api: Any, job: str) -> None:
    from flotilla.components.kubernetes.client import Watch

    def see(lease: Tree, deleted: bool) -> None:
        if not deleted and is_stop_requested(lease):
            watch.stopped.set()
            log.warning(names.STOPPING)
            guard.end_job("")

    def refuse(error: Exception) -> None:
        log.warning(
            "cannot watch for a cancellation; a cancelled job may not save a last checkpoint: %s",
            error,
        )

    watch = Watch(api, LEASES, {"fieldSelector": f"metadata.name={job}"}, see, refuse)
    watch.start()


def is_stop_requested(lease: Tree) -> bool:
    """Return whether the stop request on a lease is meant for the job that owns the lease."""
    metadata = lease["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or []]
    return (metadata.get("annotations") or {}).get(names.STOP) in owners


def _look(guard: Ending, api: Any, job: str, limit: float, age: HeartbeatAge) -> bool:
    """End the task if the launcher's heartbeat is too old, and return whether to continue."""
    from flotilla.components.kubernetes.client import RefusedError, UnreachableError
    from flotilla.components.kubernetes.heartbeat import is_renewed, read_heartbeat

    try:
        lease = api.get(LEASES, job)
        if is_stop_requested(lease):
            # If the API has refused the watch, only this check detects the stop request.
            guard.end_job("")
            return False
        limits = 1 if is_renewed(lease) else UNRENEWED_LIMITS
        if age.read(read_heartbeat(lease)) >= limits * limit:
            reason = f"no heartbeat from the launcher for {limits * limit:g} s"
            log.warning("%s: training ends", reason)
            guard.end_job(reason)
            return False
    except RefusedError as error:
        if error.code == HTTPStatus.FORBIDDEN:
            events.emit(events.LauncherUnwatched(reason=str(error)))
            return False
        age.unreadable()
    except UnreachableError:
        age.unreadable()
    except Exception:
        # A proxy may have responded with a web page, for example. The loop continues, and the time
        # until the next successful read does not count.
        age.unreadable()
        raise
    return True
