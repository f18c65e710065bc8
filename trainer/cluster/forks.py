"""The fork server of a run, a process that loads TensorFlow once and is forked for each task.

A request to the server passes over a Unix socket. The server replies with the id of the forked
process, its descriptor, and finally its exit code. If the client closes the connection earlier, the
server ends the process. Without a server, `start_process` starts a process as usual.

`python -m flotilla.trainer.cluster.forks FOLDER SOCKETS AT_ONCE LATER`: SOCKETS are the descriptors
of two listening sockets. The server loads the modules AT_ONCE, and forks a second server that loads
the modules LATER. Each server handles the requests for its own modules. Both servers exit when
standard input ends.

A forked process has only the thread that called fork, so no other thread may hold a lock that it
needs. A server runs Python in one thread. OpenBLAS (of NumPy and SciPy) and Arrow's allocator stop
or restart their threads at a fork. TensorFlow starts no thread before its first operation, and this
module runs no operation.

The kernel ends the server when its parent exits, and each process when the server exits.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import mmap
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flotilla.trainer.runtime import signals, tensorflow_import, threads

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


# Lowest number for temporary copies of inherited descriptors. Their final numbers are lower.
_TEMPORARY = 400
BACKLOG = 64
# Time to wait for the rest of a request, in seconds. Clients send it right after connecting.
_MOMENT = 0.05


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """A process that was forked but has not run its request yet."""

    request: Request
    descriptors: Sequence[int]
    parent: int

    def run(self) -> None:
        """Run the module of the request in this process, as `python -m` does."""
        gc.enable()
        signals.end_with(self.parent)
        if self.request.own_session:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._take_descriptors()
        os.environ.clear()
        os.environ.update(self.request.environment)
        os.chdir(self.request.folder)
        show_command_line(self.request.command)
        # At a fork, Python reseeds only `random`. NumPy would draw the same numbers in each task.
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        _, _, module, *arguments = self.request.command
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def _take_descriptors(self) -> None:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        for number in (1, 2):
            os.dup2(self.descriptors[0], number)
        high = [fcntl.fcntl(each, fcntl.F_DUPFD, _TEMPORARY) for each in self.descriptors]
        for each in self.descriptors:
            os.close(each)
        os.close(high[0])
        for own, number in zip(high[1:], self.request.descriptors, strict=True):
            if own != number:
                os.dup2(own, number)
                os.close(own)
            os.set_inheritable(number, True)


class Server:
    """A server that loads modules one by one, and serves fork requests after each of them."""

    def __init__(self, listener: socket.socket) -> None:
        """Serve on a listening socket."""
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._loaded: set[str] = set()
        self._arriving: dict[socket.socket, Arriving] = {}
        self._waiting: list[tuple[socket.socket, Request, list[int]]] = []
        # The process descriptor (pidfd) of each forked process, by connection.
        self._processes: dict[socket.socket, int] = {}

    def load(self, modules: Sequence[str]) -> _Copy | None:
        """Load modules, and serve requests after each. Return a value only in a forked process."""
        for name in modules:
            # Ignore errors. Clients then start the module as a new process, which reports them.
            with suppress(Exception):
                importlib.import_module(name)
                self._loaded.add(name)
            gc.freeze()
            if copy := self._serve(timeout=0):
                return copy
        return None

    def serve(self) -> _Copy:
        """Serve requests endlessly. Returns only in a forked process."""
        while True:
            for connection, _, descriptors in self._waiting:
                _close(connection, descriptors)
            self._waiting.clear()
            if copy := self._serve(timeout=None):
                return copy

    def end_with_stdin(self, following: int) -> None:
        """End this process and the server `following` when standard input ends."""
        process = os.pidfd_open(following) if following else -1

        def end(_: object) -> None:
            if following:
                with suppress(OSError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(following, 0)
            os._exit(0)

        self._selector.register(0, selectors.EVENT_READ, end)

    def close(self) -> None:
        """Close the resources of the server in a forked process."""
        self._selector.close()
        self._listener.close()
        for connection in list(self._arriving):
            self._leave(connection)
        for connection, _, descriptors in self._waiting:
            _close(connection, descriptors)
        for connection, process in self._processes.items():
            _close(connection, [process])

    def _serve(self, timeout: float | None) -> _Copy | None:
        while events := self._selector.select(timeout):
            for key, _ in events:
                key.data(key.fileobj)
            timeout = _MOMENT if self._arriving else 0
        for each in [each for each, found in self._arriving.items() if found.is_late]:
            self._forget(each)
        # Remove requests one by one, because a forked process closes the remaining ones.
        for entry in [each for each in self._waiting if each[1].loaded in self._loaded]:
            self._waiting.remove(entry)
            if copy := self._fork(*entry):
                return copy
        return None

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        try:
            is_own = is_own_user(connection)
        except OSError:
            is_own = False
        if not is_own:
            connection.close()
            return
        self._arriving[connection] = Arriving(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._read)

    def _read(self, connection: socket.socket) -> None:
        try:
            found = self._arriving[connection].read()
        except OSError:
            self._forget(connection)
            return
        if found:
            self._selector.unregister(connection)
            del self._arriving[connection]
            self._waiting.append((connection, *found))

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._leave(connection)

    def _leave(self, connection: socket.socket) -> None:
        self._arriving.pop(connection).close()
        connection.close()

    def _fork(
        self, connection: socket.socket, wanted: Request, descriptors: list[int]
    ) -> _Copy | None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            _close(connection, descriptors)
            return None
        if not pid:
            self.close()
            connection.close()
            return _Copy(request=wanted, descriptors=descriptors, parent=parent)
        process = os.pidfd_open(pid)
        for each in descriptors:
            os.close(each)
        self._processes[connection] = process
        self._selector.register(
            process, selectors.EVENT_READ, lambda _: self._report_end(connection)
        )
        self._selector.register(connection, selectors.EVENT_READ, self._kill_orphan)
        with suppress(OSError):
            send_number(connection, pid, process)
        return None

    def _report_end(self, connection: socket.socket) -> None:
        process = self._processes.pop(connection)
        self._selector.unregister(process)
        found = os.waitid(os.P_PIDFD, process, os.WEXITED)
        os.close(process)
        by_itself = found is not None and found.si_code == os.CLD_EXITED
        status = found.si_status if found is not None else 1
        with suppress(KeyError):
            self._selector.unregister(connection)
        with suppress(OSError):
            send_number(connection, status if by_itself else -status)
        connection.close()

    def _kill_orphan(self, connection: socket.socket) -> None:
        """End a process whose client has closed the connection."""
        if connection not in self._processes:
            # The process has already ended, and the server has reported its exit code.
            return
        self._selector.unregister(connection)
        with suppress(OSError):
            signal.pidfd_send_signal(self._processes[connection], signal.SIGKILL)


def _close(connection: socket.socket, descriptors: Sequence[int]) -> None:
    connection.close()
    for each in descriptors:
        os.close(each)


def main() -> None:
    """Serve requests. In a forked process, run its request."""
    signals.end_with_parent()
    threads.limit_threads()
    tensorflow_import.prepare()
    # Ignore signals sent to the process group, because the server must outlive its tasks.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    _, _, sockets, at_once, later = sys.argv
    first, second = (socket.socket(fileno=int(each)) for each in sockets.split(":"))
    try:
        show_command_line([sys.executable, "-m", __spec__.name if __spec__ else "", *sys.argv[1:]])
    except OSError:
        # If the kernel cannot change the command line, tasks are started without forks.
        return
    # Disable garbage collection during the imports, because it would free hardly any memory.
    gc.disable()
    copy = _first(first, second, at_once.split(","), later.split(",") if later else [])
    copy.run()


def _first(
    first: socket.socket, second: socket.socket, at_once: Sequence[str], later: Sequence[str]
) -> _Copy:
    server = Server(first)
    if copy := server.load(at_once):
        second.close()
        return copy
    parent = os.getpid()
    following = os.fork() if later else 0
    if later and not following:
        server.close()
        signals.end_with(parent)
        server = Server(second)
        return server.load(later) or server.serve()
    second.close()
    server.end_with_stdin(following)
    return server.serve()


_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
# Fields of `/proc/self/stat`, numbered from 1 as in proc(5).
_FIELDS = {
    "start_code": 26, "end_code": 27, "start_stack": 28, "start_data": 45, "end_data": 46,
    "start_brk": 47, "env_start": 50, "env_end": 51,
}  # fmt: skip
# This list keeps the memory of the command line mapped for the lifetime of the process.
_memory: list[mmap.mmap] = []


class _Map(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code", "end_code", "start_data", "end_data", "start_brk", "brk",
                "start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]  # fmt: skip


def show_command_line(words: Sequence[str]) -> None:
    """Set the command line that tools display. Raises `OSError` if the kernel does not allow it."""
    text = b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in words)
    # The kernel reads a command line only from private anonymous memory.
    memory = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(text)
    # The fields follow the name of the process, which may contain spaces.
    after_name = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    borders = {name: int(after_name[number - 3]) for name, number in _FIELDS.items()}
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    new = _Map(**borders, arg_start=begin, arg_end=begin + len(text), auxv=0, exe_fd=_NO_FILE)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    # Make room on the heap first, because the heap must not grow between the two calls below.
    libc.free(libc.malloc(1 << 16))
    new.brk = libc.sbrk(0)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(new), ctypes.sizeof(new), 0):
        raise OSError(ctypes.get_errno(), "PR_SET_MM_MAP")
    _memory[:] = [memory]


if __name__ == "__main__":
    main()
