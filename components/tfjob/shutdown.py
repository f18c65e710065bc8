"""The shutdown connection: parameter servers stay up until the chief has saved what they hold.

When a job is deleted, Kubernetes sends SIGTERM to all of its pods at the same time. The guard of
the leading task accepts a connection from the guard of every server. One byte on it announces that
the leader is shutting down, and its end says that the leader has ended. A server that receives
SIGTERM keeps serving in between. Without a connection it ends at once, and the last checkpoint is
the one that was published before.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

PORT = int(os.environ.get("FLOTILLA_GUARD_PORT", "2223"))
_SHUTTING_DOWN = b"e"
# Leader and server receive SIGTERM together; a server that is ended alone waits this long.
NOTICE_SECONDS = 5.0
CONNECT_SECONDS = 2.0


class ShutdownServer:
    """The leader's side: accepts a connection from every server."""

    def __init__(self, port: int = PORT) -> None:
        """Listen on `port`; if it is taken, servers end without waiting for the leader."""
        self._connections: list[socket.socket] = []
        self._shutting_down = False
        with suppress(OSError):
            self._server = socket.create_server(("", port), backlog=1024)
            threading.Thread(target=self._accept, name="shutdown-server", daemon=True).start()

    def announce(self) -> None:
        """Announce to all servers that the leader is shutting down."""
        self._shutting_down = True
        for connection in self._connections:
            _announce(connection)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            self._connections.append(connection)
            if self._shutting_down:
                _announce(connection)


class ShutdownConnection:
    """The server's side: one connection to the leader, renewed while it lasts."""

    def __init__(self, host: str, port: int = PORT) -> None:
        """Connect, and reconnect whenever the connection is lost, in a daemon thread."""
        self._address = (host, port)
        self._announced = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._connect, name="shutdown-connection", daemon=True).start()

    def wait(self, notice: float, timeout: float) -> None:
        """Return when the leader has ended, is not shutting down, or takes too long.

        Args:
            notice: seconds in which a leader that is shutting down announces it.
            timeout: seconds that it may take to end.
        """
        if self._announced.wait(notice):
            self._ended.wait(timeout)

    def _connect(self) -> None:
        while not self._ended.is_set():
            with (
                suppress(OSError),
                socket.create_connection(self._address, CONNECT_SECONDS) as connection,
            ):
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if connection.recv(1) == _SHUTTING_DOWN:
                    self._announced.set()
                    with suppress(OSError):
                        connection.recv(1)
                    self._ended.set()
            time.sleep(CONNECT_SECONDS / 2)


def _announce(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.send(_SHUTTING_DOWN)
