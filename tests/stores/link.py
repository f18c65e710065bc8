"""A TCP relay between a client and a local server that can inject connection faults."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.ports import held_port

# Each fault is one of: `refuse` (no process listens), `unanswered` (a SYN gets no response until
# the client's own timeout), `silence` (the connection is accepted, but never answered), `reset` and
# `close` (it is ended at once, with RST or FIN), `tear` and `cut` (it is ended with RST or FIN in
# the middle of a long response).
PARTIAL = ("tear", "cut")
FAULTS = ("refuse", "unanswered", "silence", "reset", "close", *PARTIAL)
_CHUNK = 1 << 16
# Number of bytes of a response that are passed on before `tear` and `cut` end it. Responses without
# content are shorter, and responses with content are longer.
_PASSED = 700


class Link:
    """A relay to a local port. Its state is a fault, or `whole`, which is the initial state."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._state = "whole"
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        # Keep the port reserved while no process listens on it.
        self._holders = ExitStack()
        self.port = self._holders.enter_context(held_port())
        self._listener = self._listen(self.port)
        self.url = f"http://127.0.0.1:{self.port}"

    def becomes(self, state: str) -> None:
        """Change the state, and reset open connections."""
        assert state in ("whole", *FAULTS)
        with self._lock:
            self._close_all()
            self._state = state
            if state == "refuse":
                return
            self._listener = self._listen(self.port, answered=state != "unanswered")

    def end(self) -> None:
        with self._lock:
            self._state = "refuse"
            self._close_all()
        self._holders.close()

    def _close_all(self) -> None:
        # `shutdown` wakes the accepting thread; `close` alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            _reset(each)
        self._open.clear()

    def _listen(self, port: int, *, answered: bool = True) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", port), backlog=128 if answered else 0)
        if answered:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        else:
            for _ in range(2):
                # These connections fill the queue, so that the kernel does not answer another SYN.
                waiting = socket.socket()
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
                self._open.add(waiting)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                caller, _ = listener.accept()
                self._take(caller)

    def _take(self, caller: socket.socket) -> None:
        with self._lock:
            state = self._state
            if state == "reset":
                _reset(caller)
                return
            if state == "close":
                caller.close()
                return
            self._open.add(caller)
            if state == "silence":
                return
            called = socket.create_connection(("127.0.0.1", self._target))
            self._open.add(called)
        limit = _PASSED if state in PARTIAL else None
        for pair, most in (((caller, called), None), ((called, caller), limit)):
            threading.Thread(target=self._pass_on, args=(*pair, most, state), daemon=True).start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, most: int | None, state: str
    ) -> None:
        with suppress(OSError):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(_CHUNK):
                target.sendall(data[:most])
                if most is not None and (most := most - len(data)) <= 0:
                    break
        for each in (source, target):
            if state == "tear":
                _reset(each)
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._lock:
            self._open -= {source, target}


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with suppress(OSError):
        end.shutdown(socket.SHUT_RD)
    end.close()


@contextmanager
def link(port: int) -> Iterator[Link]:
    """Relay to a port within the context."""
    made = Link(port)
    try:
        yield made
    finally:
        made.end()
