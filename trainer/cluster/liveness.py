"""Signs of life of a task: bytes in a pipe to the process that started it.

A process that is stopped, swapped out or stuck in the kernel dies no death that anyone could wait
for. While a task lives it writes a byte now and then; whoever started it waits for bytes. A starter
that was itself asleep finds those of the time between, so that nobody is taken for dead then.

Whether the other tasks of a cluster answer: asked on their ports, without TensorFlow.

TensorFlow waits for a task that is stopped as long as the connection stands, and the kernel keeps
it standing. A server of gRPC that lives sends its settings to whoever connects (RFC 9113, section
3.4); one that is stopped only seems to be there.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from trainer.topology import Cluster, Task

VARIABLE = "FLOTILLA_HEARTBEAT"
# A task that starts loads TensorFlow, which holds the interpreter for long on a busy machine.
STARTING_SECONDS = 180.0
# Beats that may be missed before a heart has stood still.
_BEATS = 5


def environment(descriptor: int, seconds: float) -> dict[str, str]:
    """Return the variables that let a child show life on `descriptor` well within `seconds`."""
    return {VARIABLE: f"{descriptor}:{min(1.0, seconds / _BEATS)}"}


def begin() -> None:
    """Show life from now on, where the starter of this process asked for it."""
    descriptor, _, seconds = os.environ.pop(VARIABLE, "").partition(":")
    if descriptor.isdigit():
        arguments = (int(descriptor), float(seconds))
        threading.Thread(target=_beat, args=arguments, name="heartbeat", daemon=True).start()


def wait_until_silent(descriptor: int, seconds: float) -> bool:
    """Wait until no byte has come for `seconds` (true), or the last writer has gone (false).

    The first byte may take longer; see `STARTING_SECONDS`.
    """
    patience = max(seconds, STARTING_SECONDS)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(patience * 1000):
        if not os.read(descriptor, 1 << 16):
            return False
        patience = seconds
    return True


def _beat(descriptor: int, seconds: float) -> None:
    # Nobody listens any more, which is for others to judge.
    with suppress(OSError):
        while True:
            os.write(descriptor, b".")
            time.sleep(seconds)


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


def probe_peers(cluster: Cluster, this: Task, seconds: float = ANSWER_SECONDS) -> Peers:
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
