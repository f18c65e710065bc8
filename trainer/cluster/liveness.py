"""Liveness: how a process detects whether another one makes progress.

A process that is stopped, swapped out or stuck in the kernel does not exit, so waiting for its exit
does not help. There are three signals:

- Heartbeats of a child. A task regularly writes a byte into a pipe, and its parent waits for the
  bytes. Bytes that arrive while the parent itself is stopped stay in the pipe, so the task does not
  seem dead.
- A peer's answer on its port. TensorFlow waits for a stopped task as long as the connection exists,
  and the kernel keeps it open. A live gRPC server sends its settings to each client that connects
  (RFC 9113, section 3.4). A stopped process accepts connections but sends nothing.
- The kernel's keepalive of TCP. A machine that loses power does not close its connections, and gRPC
  would notice it only after five minutes. The kernel of a stopped process still answers.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.loop import Loop

VARIABLE = "FLOTILLA_HEARTBEAT"
# Minimum timeout of a starting task, in seconds. It covers the import of TensorFlow.
STARTING_SECONDS = 180.0
# Minimum number of heartbeats per timeout. A task is alive if at least one of them arrives.
_BEATS = 5

# Time limit for an answer, in seconds. It is long enough for a process on a busy machine.
ANSWER_SECONDS = 10.0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_MAX_THREADS = 64
_ANSWERS, _SILENT, _GONE = "answers", "silent", "gone"
# Errors of a disconnected machine or network, which do not prove that the task has ended.
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN}


def heartbeat_environment(descriptor: int, timeout: float) -> dict[str, str]:
    """Return the variables of a child that sends heartbeats to the inherited `descriptor`."""
    return {VARIABLE: f"{descriptor}:{min(1.0, timeout / _BEATS)}"}


def begin() -> None:
    """Start sending heartbeats if the parent of this process requested them."""
    descriptor, _, seconds = os.environ.pop(VARIABLE, "").partition(":")
    if descriptor.isdigit():
        beat = partial(_beat, int(descriptor))
        beat()
        Loop(beat, float(seconds), name="heartbeat", failing="no heartbeat").start()


def wait_until_silent(descriptor: int, timeout: float) -> bool:
    """Return true once heartbeats stop for `timeout` seconds, or false once the writer exits."""
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
        # The parent has exited. Stop this thread without ending the task.
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The `silent` tasks, which do not answer, and the `gone` tasks, which have ended."""

    silent: tuple[Task, ...] = ()
    gone: tuple[Task, ...] = ()


def probe_peers(cluster: Cluster, this: Task, timeout: float = ANSWER_SECONDS) -> Peers:
    """Probe all tasks but `this` in parallel, and wait up to `timeout` seconds for answers."""
    tasks = [
        Task(role=role, index=index)
        for role, hosts in cluster.addresses.items()
        for index in range(len(hosts))
    ]
    tasks.remove(this)
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
        # Any other error, such as a refused connection, means that the task has ended.
        return _SILENT if error.errno in _UNREACHABLE else _GONE


# TensorFlow reads this variable (NAME=NUMBER,NAME=NUMBER) when it opens the first channel.
CHANNELS = "TF_GRPC_DEFAULT_OPTIONS"
CHANNEL_OPTIONS = {
    "grpc.dns_min_time_between_resolutions_ms": 1000,
    "grpc.initial_reconnect_backoff_ms": 100,
    # Despite its name, this is the timeout of a connection attempt. It is long enough for TCP to
    # resend two lost packets, and shorter than the start of a task.
    "grpc.min_reconnect_backoff_ms": 5000,
    # The interval of pings. A gRPC server closes a connection that repeatedly sends pings less than
    # 300 s apart without data, for example during a long call, and TensorFlow cannot change that
    # limit.
    "grpc.keepalive_time_ms": 310_000,
    # The timeout of keepalive pings, and of the pings by which gRPC measures a connection. A
    # transfer from a machine that has disappeared ends after this time.
    "grpc.http2.ping_timeout_ms": 20_000,
    # gRPC also sets TCP_USER_TIMEOUT, the time that sent data may stay unacknowledged, to this
    # value. A task may therefore be stopped or swapped out for this long (see
    # `training.stall_timeout`).
    "grpc.keepalive_timeout_ms": 120_000,
    # Send pings during the whole call. By default, gRPC stops after two.
    "grpc.http2.max_pings_without_data": 0,
    # Ignore the web proxy of the environment: it cannot reach tasks, and calls to loopback would
    # hang.
    "grpc.enable_http_proxy": 0,
}


def configure_connections(cluster: Cluster) -> None:
    """Find restarted tasks and detect lost machines quickly in this process."""
    find_tasks_soon()
    detect_lost_machines(cluster)


def find_tasks_soon() -> None:
    """Make new channels of this process find a restarted task quickly at its new address."""
    given = [each for each in os.environ.get(CHANNELS, "").split(",") if each]
    names = {each.partition("=")[0].strip() for each in given}
    added = [f"{name}={value}" for name, value in CHANNEL_OPTIONS.items() if name not in names]
    os.environ[CHANNELS] = ",".join([*given, *added])


# TCP keepalive, in seconds and probes. A connection closes after 30 + 9 * 10 s without an answer,
# which is as long as sent data may stay unacknowledged ("grpc.keepalive_timeout_ms").
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 9}
# Interval at which new connections are found, in seconds.
_KEEPALIVE_EVERY = 10.0
_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = (socket.AF_INET, socket.AF_INET6)


def detect_lost_machines(cluster: Cluster) -> None:
    """Make connections from this process to the tasks of `cluster` close if a machine is lost.

    The kernel probes idle connections, which gRPC cannot do more often than every 300 s. gRPC does
    not offer this socket option, so a thread sets it on the open connections. Does nothing on a
    system without `/proc`.
    """
    addresses = (address for hosts in cluster.addresses.values() for address in hosts)
    ports = {int(address.rpartition(":")[2]) for address in addresses}
    if _DESCRIPTORS.exists():
        work = partial(enable_keepalive, ports)
        Loop(work, _KEEPALIVE_EVERY, name="keepalive", failing="no TCP keepalive").start()


def enable_keepalive(ports: Collection[int]) -> None:
    """Enable TCP keepalive on this process's connections to `ports` of any host."""
    for entry in os.listdir(_DESCRIPTORS):
        # The descriptor was closed in the meantime, or is not connected.
        with suppress(OSError):
            if os.readlink(_DESCRIPTORS / entry).startswith("socket:"):
                _enable_keepalive(int(entry), ports)


def _enable_keepalive(descriptor: int, ports: Collection[int]) -> None:
    # A duplicate stays the same connection if gRPC closes its descriptor now.
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family not in _INTERNET or connection.getpeername()[1] not in ports:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
