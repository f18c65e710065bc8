"""Liveness: how a process sees that another one makes progress, and not only that it exists.

A process that is stopped, swapped out or stuck in the kernel does not end, so that no wait for its
end helps. There are two signals:

- The heartbeat of a child. A task writes a byte into a pipe at an interval, and the process that
  started it waits for bytes. Bytes that came while the starter itself was stopped are still in the
  pipe, so that a task is not taken for dead then.
- An answer of a peer on its port. TensorFlow waits for a stopped task as long as the connection
  exists, and the kernel keeps it. A gRPC server that is alive sends its settings to each client
  that connects (RFC 9113, section 3.4); that of a stopped process accepts and sends nothing.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.background import Loop

VARIABLE = "FLOTILLA_HEARTBEAT"
# A task that starts loads TensorFlow, which holds the interpreter lock for long on a busy machine.
STARTING_SECONDS = 180.0
# Heartbeats within the timeout: so many may be missed.
_BEATS = 5

# Long enough for a process that a busy machine delays.
ANSWER_SECONDS = 10.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_MAX_THREADS = 64
_ANSWERS, _SILENT, _GONE = "answers", "silent", "gone"
# Of a machine or a network that is cut off: nobody says that the task has ended.
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


def heartbeat_environment(descriptor: int, timeout: float) -> dict[str, str]:
    """Return the variables of a child that sends heartbeats to the inherited `descriptor`."""
    return {VARIABLE: f"{descriptor}:{min(1.0, timeout / _BEATS)}"}


def begin() -> None:
    """Send heartbeats from now on, if the starter of this process has asked for them."""
    descriptor, _, seconds = os.environ.pop(VARIABLE, "").partition(":")
    if descriptor.isdigit():
        beat = partial(_beat, int(descriptor))
        beat()
        Loop(beat, float(seconds), name="heartbeat", failing="no heartbeat").start()


def wait_until_silent(descriptor: int, timeout: float) -> bool:
    """Wait until no heartbeat has come for `timeout` seconds (true), or the writer ends (false)."""
    seconds = max(timeout, STARTING_SECONDS)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while poll.poll(seconds * 1000):
        if not os.read(descriptor, 1 << 16):
            return False
        seconds = timeout
    return True


def _beat(descriptor: int) -> bool:
    try:
        os.write(descriptor, b".")
    except OSError:
        # The reader is gone; what follows from that is not for this process to decide.
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Tasks that are `silent`, or cannot be reached, and those that are `gone`: they have ended."""

    silent: tuple[Task, ...] = ()
    gone: tuple[Task, ...] = ()


def probe_peers(cluster: Cluster, this: Task, timeout: float = ANSWER_SECONDS) -> Peers:
    """Probe all tasks but `this` at once, and wait up to `timeout` seconds for their answers."""
    others = [
        Task(role=role, index=index)
        for role, hosts in cluster.addresses.items()
        for index in range(len(hosts))
    ]
    others.remove(this)
    return probe(cluster, others, timeout)


def probe(cluster: Cluster, tasks: Sequence[Task], timeout: float = ANSWER_SECONDS) -> Peers:
    """Probe some tasks at once, and wait up to `timeout` seconds for their answers."""
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        answers = list(pool.map(lambda task: _answer(cluster.address(task), timeout), tasks))

    def those(word: str) -> tuple[Task, ...]:
        return tuple(task for task, answer in zip(tasks, answers, strict=True) if answer == word)

    return Peers(silent=those(_SILENT), gone=those(_GONE))


def _answer(address: str, timeout: float) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout) as peer:
            peer.sendall(_PREFACE)
            return _ANSWERS if peer.recv(1) else _GONE
    except TimeoutError:
        return _SILENT
    except OSError as error:
        # Else refused, an unknown host name, or reset because the task was killed meanwhile.
        return _SILENT if error.errno in _UNREACHABLE else _GONE


# Read by TensorFlow once, when a process opens its first channel: NAME=NUMBER,NAME=NUMBER.
CHANNELS = "TF_GRPC_DEFAULT_OPTIONS"
CHANNEL_OPTIONS = {
    # As often as TensorFlow's channels try to connect.
    "grpc.dns_min_time_between_resolutions_ms": 1000,
    # Tried again so soon after a connection was refused, then more and more seldom. Else after 1 s.
    "grpc.initial_reconnect_backoff_ms": 100,
    # How long gRPC waits for a connection, whatever its name says. Within it two lost packets of
    # TCP are sent again, and a task that starts does not serve before it is over.
    "grpc.min_reconnect_backoff_ms": 5000,
    # gRPC's servers close a channel that asks more than twice within 300 s without having been sent
    # anything, as in a call that lasts for hours, and no option of TensorFlow's changes that.
    "grpc.keepalive_time_ms": 310_000,
    "grpc.http2.ping_timeout_ms": 60_000,
    # gRPC sets TCP_USER_TIMEOUT to it: how long bytes that were sent may be unacknowledged. Not
    # shorter than a task may be stopped or swapped out, by `training.stall_timeout`.
    "grpc.keepalive_timeout_ms": 120_000,
    # Asked again for as long as a call lasts; otherwise twice.
    "grpc.http2.max_pings_without_data": 0,
    # Not through a proxy that the environment names for the web: it knows no task, and calls to
    # loopback would hang.
    "grpc.enable_http_proxy": 0,
}


def find_tasks_soon() -> None:
    """Have the channels of this process, not yet connected, find a task at its new address."""
    given = [each for each in os.environ.get(CHANNELS, "").split(",") if each]
    names = {each.partition("=")[0].strip() for each in given}
    added = [f"{name}={value}" for name, value in CHANNEL_OPTIONS.items() if name not in names]
    os.environ[CHANNELS] = ",".join([*given, *added])
