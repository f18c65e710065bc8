"""Parameter servers outlive their chief by a moment, so that it can save what they hold.

When a job is deleted all of its pods are asked to end at the same time. The guard of the leading
task keeps a connection to the guards of the others: over it it says that it is ending, and its
closing says that it has ended. Until then a server that was asked to end goes on serving. Where
there is no connection, it ends at once, and the checkpoint before is the last one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

PORT = int(os.environ.get("FLOTILLA_GUARD_PORT", "2223"))
_ENDING = b"e"
# Both are asked at the same moment; a server that is asked alone ends after so long.
NOTICE_SECONDS = 5.0
CONNECT_SECONDS = 2.0


class ShutdownServer:
    """The leader's end: a connection for every other task."""

    def __init__(self, port: int = PORT) -> None:
        """Listen; without the port the others end when they are asked to."""
        self._connections: list[socket.socket] = []
        self._ending = False
        with suppress(OSError):
            self._server = socket.create_server(("", port), backlog=1024)
            threading.Thread(target=self._accept, name="anchor", daemon=True).start()

    def ending(self) -> None:
        """Tell all others that the leader is ending."""
        self._ending = True
        for connection in self._connections:
            _tell(connection)

    def close(self) -> None:
        """Let the others go, as the end of this process does."""
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            self._connections.append(connection)
            if self._ending:
                _tell(connection)


class ShutdownConnection:
    """The other end: what a server knows of its leader."""

    def __init__(self, host: str, port: int = PORT) -> None:
        """Connect, and again whenever the connection is gone, in a thread."""
        self._address = (host, port)
        self._ending = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._hold, name="tether", daemon=True).start()

    def wait(self, notice: float, most: float) -> None:
        """Return when the leader has ended, or is not ending, or is taking too long.

        Args:
            notice: seconds in which a leader that is ending says so.
            most: seconds that it may take to end.
        """
        if self._ending.wait(notice):
            self._ended.wait(most)

    def _hold(self) -> None:
        while not self._ended.is_set():
            with (
                suppress(OSError),
                socket.create_connection(self._address, CONNECT_SECONDS) as held,
            ):
                held.settimeout(None)
                held.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if held.recv(1) == _ENDING:
                    self._ending.set()
                    with suppress(OSError):
                        held.recv(1)
                    self._ended.set()
            time.sleep(CONNECT_SECONDS / 2)


def _tell(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.send(_ENDING)
