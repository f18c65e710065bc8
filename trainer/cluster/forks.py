"""Starts processes through the fork server of this run, or without a fork.

A request to the server passes over a Unix socket. The server replies with the id of the forked
process, its descriptor, and finally its exit code. If the client closes the connection earlier, the
server ends the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

# The variable with the server's address, which child processes inherit.
VARIABLE = "FLOTILLA_FORK_SERVER"
# The value that disables forking.
NONE = "none"
_HIGH = 200
_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!q")
_MOST_DESCRIPTORS = 16
_MOST_BYTES = 1 << 26
_PART_BYTES = 1 << 16
# Timeout of a transfer, in seconds. It is short, because client and server are on one machine.
_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """A process to fork: `python -m MODULE ...`.

    Attributes:
        command: the whole command line, with the module as its third item.
        loaded: the module that the server must have loaded, or empty to start the process without a
            fork.
        environment: the whole environment.
        descriptors: the descriptors that the process inherits, under the same numbers.
    """

    command: Sequence[str]
    loaded: str
    folder: str
    environment: Mapping[str, str]
    own_session: bool = False
    descriptors: Sequence[int] = ()


def send(connection: socket.socket, request: Request, output: int) -> None:
    """Send `request`, `output` and the descriptors of the request. Raises `OSError`."""
    connection.settimeout(_SECONDS)
    text = json.dumps(asdict(request)).encode()
    own = [output, *request.descriptors]
    socket.send_fds(connection, [_LENGTH.pack(len(text))], own)
    connection.sendall(text)
    connection.settimeout(None)


class Arriving:
    """An incoming request. The server does not wait for a client that stops sending."""

    def __init__(self, connection: socket.socket) -> None:
        """Read from a connection, which becomes non-blocking."""
        connection.setblocking(False)
        self._connection = connection
        self._data = bytearray()
        self._descriptors: list[int] = []
        self._until = time.monotonic() + _SECONDS

    @property
    def is_late(self) -> bool:
        """Whether the client has exceeded the time limit of a request."""
        return time.monotonic() > self._until

    def read(self) -> tuple[Request, list[int]] | None:
        """Return the request and descriptors (closed by the caller), or None. Raises `OSError`."""
        with suppress(BlockingIOError):
            while True:
                part, descriptors, _, _ = socket.recv_fds(
                    self._connection, _PART_BYTES, _MOST_DESCRIPTORS
                )
                self._descriptors += descriptors
                if not part:
                    raise ConnectionResetError("the connection has ended")
                self._data += part
                if found := self._whole():
                    self._connection.setblocking(True)
                    return found
        return None

    def close(self) -> None:
        """Close the received descriptors."""
        for each in self._descriptors:
            os.close(each)
        self._descriptors.clear()

    def _whole(self) -> tuple[Request, list[int]] | None:
        if len(self._data) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._data)
        if length > _MOST_BYTES:
            raise OSError("the request is damaged or comes from another program")
        text = self._data[_LENGTH.size :]
        if len(text) < length:
            return None
        try:
            request = Request(**json.loads(text[:length]))
            are_there = len(self._descriptors) == 1 + len(request.descriptors)
        except (ValueError, TypeError) as error:
            raise OSError("the request is damaged or comes from another program") from error
        if not are_there:
            raise OSError("file descriptors are missing")
        return request, self._descriptors


def send_number(connection: socket.socket, number: int, descriptor: int | None = None) -> None:
    """Send the id of a process with its descriptor, or an exit code alone."""
    own = [] if descriptor is None else [descriptor]
    socket.send_fds(connection, [_NUMBER.pack(number)], own)


def receive_number(connection: socket.socket) -> tuple[int, int | None]:
    """Return the next number, and its descriptor if one was sent. Raises `OSError`."""
    # A Unix socket never splits a message of this size.
    data, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 1)
    if not data:
        raise ConnectionResetError("the connection has ended")
    (number,) = _NUMBER.unpack(data)
    return number, descriptors[0] if descriptors else None


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the other end is a process of the same user."""
    own = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", own)
    return bool(user == os.getuid())


class Forked:
    """A process forked by a fork server. The kernel ends it when the server exits.

    Its methods are those of `subprocess.Popen`.
    """

    def __init__(self, connection: socket.socket, pid: int, descriptor: int) -> None:
        """Watch the process `pid`, to which `descriptor` refers."""
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._descriptor = descriptor
        self._has_ended = threading.Event()
        threading.Thread(target=self._follow, name=f"process {pid}", daemon=True).start()

    def _follow(self) -> None:
        try:
            code, _ = receive_number(self._connection)
        except OSError:
            # The connection fails only if the server has ended, and the kernel then kills the
            # process.
            code = -signal.SIGKILL
        self._connection.close()
        self.returncode = code
        self._has_ended.set()

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to exit. Return the exit code, which is negative for a signal."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal if the process is running."""
        # Use the process descriptor, because the id may now belong to another process.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, sig)

    def kill(self) -> None:
        """Send SIGKILL if the process is running."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        """Close the descriptor of the process."""
        with suppress(OSError):
            os.close(self._descriptor)


Process = subprocess.Popen[bytes] | Forked


def server_address() -> str:
    """Return the address of the fork server for this process, or "" if there is none."""
    named = os.environ.get(VARIABLE, "")
    return "" if named == NONE else named


def fork(address: str, wanted: Request, output: int) -> Forked | None:
    """Return a process that the server at `address` has forked, or None if that fails."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address}")
        if not is_own_user(connection):
            raise PermissionError("the server belongs to another user")
        send(connection, wanted, output)
        pid, descriptor = receive_number(connection)
    except OSError:
        connection.close()
        return None
    assert descriptor is not None
    return Forked(connection, pid, descriptor)


def start_process(wanted: Request, output: int) -> Process:
    """Start a process. If possible and `loaded` is not empty, the fork server forks it."""
    address = server_address()
    if address and wanted.loaded and (found := fork(address, wanted, output)):
        return found
    return subprocess.Popen(
        wanted.command,
        cwd=wanted.folder,
        env=wanted.environment,
        pass_fds=wanted.descriptors,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=wanted.own_session,
    )


def high(descriptor: int) -> int:
    """Move a descriptor to a number that no library uses, and return the number."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return copy
