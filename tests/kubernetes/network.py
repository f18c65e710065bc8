"""The names of pods, which come and go, and the connections between them, which outlast the names.

Every pod has a headless Service of its name: `POD.NAMESPACE.svc` resolves while that Service exists
and the pod runs, and neither is being deleted. All pods are processes of this machine, each with a
port of its own. TensorFlow connects through a proxy (`grpc_proxy`, HTTP's CONNECT), which looks the
name up when a connection is opened; sockets of Python ask it too (see `tests.kubernetes.resolver`).
A connection that is open stays open until one of its ends closes it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.kubernetes.resolver import VARIABLE
from tests.kubernetes.store import RefusedError, Store

CHUNK = 1 << 18
DOMAIN = "svc"
LOOPBACK = "127.0.0.1"


def host_of(pod: str, namespace: str) -> str:
    """Return the name of a pod in the cluster's DNS."""
    return f"{pod}.{namespace}.{DOMAIN}"


class Network:
    """Resolves the names of pods, and relays connections; as a context manager it serves.

    Attributes:
        refused: the names for which a connection was refused so far.
    """

    def __init__(self, store: Store) -> None:
        self.refused: list[str] = []
        self._store = store
        self._server = socket.create_server((LOOPBACK, 0), backlog=256)

    def __enter__(self) -> Network:
        _in_background(self._accept)
        return self

    def __exit__(self, *_error: object) -> None:
        # Wakes the thread that accepts; `close` alone does not.
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    @property
    def environment(self) -> dict[str, str]:
        """Return what a pod's processes need to use it."""
        address = f"{LOOPBACK}:{self._server.getsockname()[1]}"
        return {"grpc_proxy": f"http://{address}", VARIABLE: address}

    def resolves(self, host: str) -> bool:
        """Return whether a name has an address now."""
        parts = host.split(".")
        if len(parts) != 3 or parts[2] != DOMAIN:
            return host in (LOOPBACK, "localhost")
        pod, namespace, _ = parts
        with self._store.changed, suppress(RefusedError):
            self._store.get("services", namespace, pod)
            found = self._store.get("pods", namespace, pod)
            is_ending = bool(found["metadata"].get("deletionTimestamp"))
            return found["status"].get("phase") == "Running" and not is_ending
        return False

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            _in_background(self._answer, caller)

    def _answer(self, caller: socket.socket) -> None:
        """Serve `CONNECT HOST:PORT` by relaying, `RESOLVE HOST` by an address or nothing."""
        with suppress(OSError), caller:
            method, target = _request(caller)
            if method == "RESOLVE":
                caller.sendall(LOOPBACK.encode() if self.resolves(target) else b"")
                return
            host, _, port = target.rpartition(":")
            called = self._connect(host, int(port))
            if called is None:
                caller.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                return
            with called:
                caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = _in_background(_pass_on, called, caller)
                _pass_on(caller, called)
                back.join()

    def _connect(self, host: str, port: int) -> socket.socket | None:
        if not self.resolves(host):
            with self._store.changed:
                self.refused.append(host)
                self._store.changed.notify_all()
            return None
        with suppress(OSError):
            return socket.create_connection((LOOPBACK, port))
        return None


def _request(caller: socket.socket) -> tuple[str, str]:
    """Read the head of a request, and no byte more; return its method and its target."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = caller.recv(1)
        if not byte:
            raise OSError("the caller has gone")
        head += byte
    method, target, *_ = head.decode().split()
    return method, target


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := source.recv(CHUNK):
            target.sendall(data)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _in_background(function: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
