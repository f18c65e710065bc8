"""Whether the other tasks of a cluster answer: asked on their ports, without TensorFlow.

TensorFlow waits for a task that is stopped as long as the connection stands, and the kernel keeps
it standing. A server of gRPC that lives sends its settings to whoever connects (RFC 9113, section
3.4); one that is stopped only seems to be there.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from trainer.cluster import Cluster, Task

# Long enough for a process that a busy machine lets wait.
ANSWER_SECONDS = 10.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class Peers:
    """How the other tasks were found.

    Attributes:
        silent: those that are there and do not answer.
        gone: those that are not there: they have ended, and whoever watches them knows.
    """

    silent: tuple[Task, ...] = ()
    gone: tuple[Task, ...] = ()


def look(cluster: Cluster, this: Task, seconds: float = ANSWER_SECONDS) -> Peers:
    """Ask the tasks beside `this`, and wait up to `seconds` for their answers."""
    others = [
        Task(role=role, index=index)
        for role, hosts in cluster.addresses.items()
        for index in range(len(hosts))
    ]
    others.remove(this)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        heard = list(pool.map(lambda task: _answers(cluster.address(task), seconds), others))
    found = list(zip(others, heard, strict=True))
    return Peers(
        silent=tuple(task for task, answers in found if answers is False),
        gone=tuple(task for task, answers in found if answers is None),
    )


def _answers(address: str, seconds: float) -> bool | None:
    """Say whether a task answers; None when it is not there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds) as peer:
            peer.sendall(_PREFACE)
            return True if peer.recv(1) else None
    except TimeoutError:
        return False
    except OSError:
        # Refused, a name that leads nowhere, or reset: it was killed while it was asked.
        return None
