"""Requests to a fork server, and their transfer over a Unix socket.

The server replies with the id of the forked process, its descriptor, and finally its exit code. If
the client closes the connection earlier, the server ends the process.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

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
    head, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, 1)
    (number,) = _NUMBER.unpack(_whole(connection, _NUMBER.size, head))
    return number, descriptors[0] if descriptors else None


def _whole(connection: socket.socket, length: int, begun: bytes = b"") -> bytes:
    parts = [begun]
    missing = length - len(begun)
    while missing:
        part = connection.recv(missing)
        if not part:
            raise ConnectionResetError("the connection has ended")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def is_own_user(connection: socket.socket) -> bool:
    """Return whether the other end is a process of the same user."""
    own = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", own)
    return bool(user == os.getuid())
