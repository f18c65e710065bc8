"""The ports of a local cluster, closed to all connections except those over loopback.

TensorFlow's servers run any graph that they receive, and listen on every address of the machine.
Their address cannot be set, but their port can be shared (SO_REUSEPORT). Therefore, a socket of
this process listens first, and a filter makes the kernel choose between the two: a connection over
loopback goes to the server, and any other one to this socket, which drops it. The filter is active
before the server listens. Until then, loopback connections also go to this socket, which closes
them, and the clients try again. See `docs/decisions/0032-pods-and-networks.md`.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import logging
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)
WARNING = (
    "this system cannot restrict TensorFlow's servers to loopback, so other machines can reach "
    "the tasks of this run and run any graph as this user: see docs/security.md"
)
# Variable for the host of the leading task's metrics: loopback by default, `*` in a pod.
METRICS_HOST, EVERY_HOST = "FLOTILLA_METRICS_HOST", "*"
# TensorFlow reads this variable when it creates a server.
_SHARE_PORT = "TF_GRPC_REUSE_PORT"
# Socket options, from asm-generic/socket.h.
_ATTACH_FILTER, _ATTACH_REUSEPORT_FILTER = 26, 51
# From linux/filter.h: offsets above this one count from the start of the IP header.
_IP = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
_DROP = [(_RETURN, 0, 0, 0)]
# An instruction is (operation, instructions to skip if its comparison is true, instructions to skip
# if it is false, value). The result is an index into the sockets that share the port. The source is
# checked too, because a router may forward packets to 127.0.0.0/8 (`route_localnet`).
_SERVER_IF_LOOPBACK = [
    (_LOAD_BYTE, 0, 0, _IP),
    (_SHIFT_RIGHT, 0, 0, 4),
    (_IF_EQUAL, 0, 4, 4),
    # For IPv4, the source and the destination must be in 127.0.0.0/8.
    (_LOAD_BYTE, 0, 0, _IP + 12),
    (_IF_EQUAL, 0, 11, 127),
    (_LOAD_BYTE, 0, 0, _IP + 16),
    (_IF_EQUAL, 8, 9, 127),
    # For IPv6, the destination must be ::1, which the kernel accepts from no other interface.
    (_LOAD_WORD, 0, 0, _IP + 24),
    (_IF_EQUAL, 0, 7, 0),
    (_LOAD_WORD, 0, 0, _IP + 28),
    (_IF_EQUAL, 0, 5, 0),
    (_LOAD_WORD, 0, 0, _IP + 32),
    (_IF_EQUAL, 0, 3, 0),
    (_LOAD_WORD, 0, 0, _IP + 36),
    (_IF_EQUAL, 0, 1, 1),
    (_RETURN, 0, 0, 1),
    (_RETURN, 0, 0, 0),
]
# The kernel keeps as many bytes of a packet as this filter returns, so 0 drops the packet.
_DROP_OTHERS = [*_SERVER_IF_LOOPBACK[:-2], (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)]
# Maximum number of connections that wait to be accepted. It must suffice for all tasks that wait
# for this one, because each of them connects several times per second.
_BACKLOG = 128
_PAUSE_SECONDS = 0.05
# Number of test connections, and the timeout of each in seconds. One connection would not be
# enough: a kernel that ignores the filter distributes connections at random.
_TRIALS, _TRIAL_SECONDS = 8, 1.0
# The sockets stay open as long as this process runs.
_closed: list[socket.socket] = []


def is_loopback(address: str) -> bool:
    """Return whether `host:port` names a loopback address."""
    host = address.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def close_to_others(address: str) -> None:
    """Let only loopback connections reach the server that this process creates at `address`.

    An address that other machines need stays open. On a system without this filter, all ports stay
    open, and a warning is logged. Raises `UserError` if the port is taken.
    """
    if not is_loopback(address):
        return
    if not can_close():
        log.warning(WARNING)
        return
    try:
        held = _open_listener(int(address.rpartition(":")[2]), _DROP_OTHERS)
    except OSError as error:
        raise UserError(f"cannot serve on {address}: {error.strerror}") from None
    _closed.append(held)
    threading.Thread(target=_close_each, args=(held,), name="loopback", daemon=True).start()
    os.environ[_SHARE_PORT] = "1"


def _close_each(held: socket.socket) -> None:
    while True:
        try:
            held.accept()[0].close()
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EBADF}:
                return
            # Try again, because too many files may be open at the moment.
            time.sleep(_PAUSE_SECONDS)


def can_close() -> bool:
    """Return whether this system can close a port to other machines."""
    if sys.platform != "linux":
        return False
    try:
        with _open_listener(0, _DROP) as dropping:
            port = dropping.getsockname()[1]
            with _bound(port) as server:
                server.listen(_TRIALS)
                for _ in range(_TRIALS):
                    socket.create_connection(("127.0.0.1", port), _TRIAL_SECONDS).close()
    except OSError:
        return False
    return True


def _open_listener(port: int, passed: list[tuple[int, int, int, int]]) -> socket.socket:
    held = _bound(port)
    try:
        _attach(held, _ATTACH_REUSEPORT_FILTER, _SERVER_IF_LOOPBACK)
        _attach(held, _ATTACH_FILTER, passed)
        held.listen(_BACKLOG)
    except OSError:
        held.close()
        raise
    return held


def _bound(port: int) -> socket.socket:
    """Return a socket with gRPC's options: sockets share a port only if their options are equal."""
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _attach(held: socket.socket, option: int, program: list[tuple[int, int, int, int]]) -> None:
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HP", len(program), ctypes.addressof(buffer))
    held.setsockopt(socket.SOL_SOCKET, option, filters)
