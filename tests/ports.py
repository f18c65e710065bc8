"""Ports that nobody else is given, for servers that start later, or for none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port of loopback that the kernel gives to nobody who asks for any.

    It is bound, and nobody listens: a connection is refused. A server that shares addresses, as
    those of the standard library do, may bind it too.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
