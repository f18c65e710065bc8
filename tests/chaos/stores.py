"""Storage for runs: a folder, or an object store behind a proxy that simulates outages."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from flotilla.trainer import storage
from tests.stores.s3_server import S3Server, s3_server

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16


class Folder:
    """A store in a local folder, which has no outages."""

    variables: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self._path = path
        self.root = storage.uri_of(path)

    def names(self, prefix: str) -> list[str]:
        files = (path for path in (self._path / prefix).rglob("*") if path.is_file())
        return sorted(str(path.relative_to(self._path)) for path in files)

    def read(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        """Replace a file, bypassing Flotilla's checks."""
        (self._path / name).write_bytes(data)

    def close_for(self, seconds: float, *, silent: bool) -> None:
        """Raise an error, because a plan with outages uses an object store."""
        raise NotImplementedError

    def open(self) -> None:
        """Do nothing: the store is always reachable."""


class Bucket:
    """An object store behind a proxy."""

    _prefix = "flotilla/"

    def __init__(self, server: S3Server, door: Door) -> None:
        """Connect to the server directly; the runs connect through the proxy."""
        self._server, self._door = server, door
        # All servers in this process share their objects, so each run gets its own bucket.
        self._bucket = f"chaos-{secrets.token_hex(4)}"
        self.root = f"s3://{self._bucket}/flotilla"
        server.create_bucket(self._bucket)
        self.variables: Mapping[str, str] = {
            "AWS_ACCESS_KEY_ID": "chaos",
            "AWS_SECRET_ACCESS_KEY": "chaos",
            "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{door.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def names(self, prefix: str) -> list[str]:
        keys = (key.removeprefix(self._prefix) for key in self._server.keys(self._bucket))
        return [name for name in keys if name.startswith(f"{prefix}/")]

    def read(self, name: str) -> bytes:
        return self._server.content(self._bucket, self._prefix + name)

    def write(self, name: str, data: bytes) -> None:
        """Replace an object, bypassing Flotilla's checks."""
        self._server.replace(self._bucket, self._prefix + name, data)

    def close_for(self, seconds: float, *, silent: bool) -> None:
        self._door.close_for(seconds, silent=silent)

    def open(self) -> None:
        self._door.end_outage()


Store = Folder | Bucket


@contextmanager
def store_below(folder: Path, *, has_outages: bool) -> Iterator[Store]:
    """Yield a store for the runs, which this process can reach inside the `with` block."""
    if not has_outages:
        yield Folder(folder / "store")
        return
    with s3_server() as server, Door(int(server.url.rpartition(":")[2])) as door:
        store = Bucket(server, door)
        with patch.dict(os.environ, store.variables):
            yield store


class Door:
    """Relays connections from its own port, except during an outage; a context manager."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._flows = threading.Event()
        self._flows.set()
        self._open: set[socket.socket] = set()
        self._socket = _bound(0)
        self.port: int = self._socket.getsockname()[1]
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Door:
        self._listen()
        return self

    def __exit__(self, *_error: object) -> None:
        self.end_outage()
        self._hang_up()

    def close_for(self, seconds: float, *, silent: bool) -> None:
        """Refuse connections for a while, or accept them without relaying data."""
        self.end_outage()
        self._flows.clear()
        if not silent:
            self._hang_up()
            # A bound port that does not listen refuses connections and stays reserved.
            self._socket = _bound(self.port)
        self._timer = threading.Timer(seconds, self.end_outage if silent else self._reopen)
        self._timer.daemon = True
        self._timer.start()

    def end_outage(self) -> None:
        timer, self._timer = self._timer, None
        if timer and timer.is_alive() and timer is not threading.current_thread():
            timer.cancel()
            if timer.function == self._reopen:
                self._listen()
        self._flows.set()

    def _reopen(self) -> None:
        self._listen()
        self._flows.set()

    def _listen(self) -> None:
        self._socket.listen(256)
        _in_background(self._accept, self._socket)

    def _hang_up(self) -> None:
        _shut(self._socket, *list(self._open))
        self._socket.close()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                caller, _ = listening.accept()
                _in_background(self._serve, caller)

    def _serve(self, caller: socket.socket) -> None:
        with caller, socket.create_connection((LOOPBACK, self._to)) as server:
            self._open |= {caller, server}
            back = _in_background(self._relay, server, caller)
            self._relay(caller, server)
            back.join()
            self._open -= {caller, server}

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                self._flows.wait()
                target.sendall(data)
        _shut(source, target)


def _shut(*sockets: socket.socket) -> None:
    """Wake the threads that wait for these connections, so that they close them."""
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((LOOPBACK, port))
    return bound


def _in_background(act: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=act, args=arguments, daemon=True)
    thread.start()
    return thread
