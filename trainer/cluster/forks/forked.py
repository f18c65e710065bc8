"""Functions that start processes, through the fork server of this run or without a fork."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from typing import Protocol

from flotilla.trainer.cluster.forks import fork_request
from flotilla.trainer.cluster.forks.fork_request import Request

# The variable with the server's address, which child processes inherit.
VARIABLE = "FLOTILLA_FORK_SERVER"
# The value that disables forking.
NONE = "none"
_HIGH = 200


class Process(Protocol):
    """The common interface of `subprocess.Popen` and `Forked`."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to exit. Return the exit code, which is negative for a signal."""

    def send_signal(self, sig: int) -> None:
        """Send a signal if the process is running."""

    def kill(self) -> None:
        """Send SIGKILL if the process is running."""


class Forked:
    """A process forked by a fork server. The kernel ends it when the server exits."""

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
            code, _ = fork_request.receive_number(self._connection)
        except OSError:
            # The connection fails only if the server has ended, and the kernel then kills the
            # process.
            code = -signal.SIGKILL
        self._connection.close()
        self.returncode = code
        self._has_ended.set()

    def poll(self) -> int | None:
        """See `Process`."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `Process`."""
        if not self._has_ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """See `Process`."""
        # Use the process descriptor, because the id may now belong to another process.
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, sig)

    def kill(self) -> None:
        """See `Process`."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        """Close the descriptor of the process."""
        with suppress(OSError):
            os.close(self._descriptor)


def server_address() -> str:
    """Return the address of the fork server for this process, or "" if there is none."""
    named = os.environ.get(VARIABLE, "")
    return "" if named == NONE else named


def fork(address: str, wanted: Request, output: int) -> Forked | None:
    """Return a process that the server at `address` has forked, or None if that fails."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{address}")
        if not fork_request.is_own_user(connection):
            raise PermissionError("the server belongs to another user")
        fork_request.send(connection, wanted, output)
        pid, descriptor = fork_request.receive_number(connection)
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
