"""The shutdown connection: servers end after the leading task, which saves their variables.

Kubernetes sends SIGTERM to all pods of a job at the same time. Therefore the guard of the leading
task accepts a connection from the guard of every worker and server. A byte announces the leader's
shutdown, and the end of the connection means that the leader has ended. Until then, a server keeps
running. Without an announcement, the server ends after `NOTICE_SECONDS`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

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
