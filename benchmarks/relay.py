"""Counts the bytes that tasks send each other: `python -m benchmarks.relay PORT...`.

Prints a line of JSON: `addresses` has one address for each port, from which connections are
forwarded to the port; `counter` is an address that returns the number of bytes forwarded so far.
The relay runs in its own process, because TensorFlow holds the GIL of a chief while it connects.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from flotilla.trainer.runtime import signals

CHUNK = 1 << 18


class Relay:
    """Forwards the bytes of both directions and counts them."""

    def __init__(self) -> None:
        """Set the number of bytes to 0."""
        self.bytes = 0
        self._lock = threading.Lock()

    def to(self, port: int) -> Callable[[socket.socket], None]:
        """Return a function that connects a caller to a port."""

        def connect(caller: socket.socket) -> None:
            try:
                called = socket.create_connection(("127.0.0.1", port))
            except OSError:
                # The port is not open yet; the caller will try again.
                caller.close()
                return
            _in_background(self._pass_on, caller, called)
            _in_background(self._pass_on, called, caller)

        return connect

    def tell(self, caller: socket.socket) -> None:
        """Send the count to the caller."""
        with caller:
            caller.sendall(str(self.bytes).encode())

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(CHUNK):
                with self._lock:
                    self.bytes += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def count(counter: str) -> int:
    """Return the number of bytes forwarded so far, as reported at the address `counter`."""
    host, _, port = counter.rpartition(":")
    with socket.create_connection((host, int(port))) as peer:
        return int(peer.makefile().read())


def _in_background(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _served(answer: Callable[[socket.socket], None]) -> str:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            answer(server.accept()[0])

    _in_background(serve)
    return f"127.0.0.1:{server.getsockname()[1]}"


def main() -> None:
    """Serve until the parent process exits."""
    signals.end_with_parent()
    relay = Relay()
    said = {
        "addresses": [_served(relay.to(int(port))) for port in sys.argv[1:]],
        "counter": _served(relay.tell),
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
