"""Free ports on loopback, held for as long as a cluster lives.

Two clusters that start at once must not choose the same port, and a restarted task needs its old
one again. A socket that is bound but does not listen does both: with SO_REUSEADDR on each side the
task may bind and listen beside it, while the kernel gives the port to nobody who asks for any.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trainer.cluster import Cluster

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that nobody holds at this moment."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def held_cluster(tasks: dict[str, int]) -> Iterator[Cluster]:
    """Yield a cluster of `tasks` (role to count) on ports that stay reserved in the block."""
    with ExitStack() as sockets:
        addresses = {
            role: tuple(f"{HOST}:{_hold(sockets)}" for _ in range(count))
            for role, count in tasks.items()
        }
        yield Cluster(addresses=addresses)


def _hold(sockets: ExitStack) -> int:
    holder = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((HOST, 0))
    return int(holder.getsockname()[1])
