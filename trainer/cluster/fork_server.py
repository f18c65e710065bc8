"""The fork server of a run: a process that loads TensorFlow once, and is forked for each task.

`python -m flotilla.trainer.cluster.fork_server FOLDER SOCKETS AT_ONCE LATER`: SOCKETS are the
descriptors of two listening sockets. The server loads the modules AT_ONCE, and forks a second
server that loads the modules LATER. Each server handles the requests for its own modules. Both
servers exit when standard input ends.

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
import mmap
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.trainer.cluster import forks
from flotilla.trainer.cluster.forks import Arriving, Request
from flotilla.trainer.runtime import cores, signals, tensorflow_import

# Lowest number for temporary copies of inherited descriptors. Their final numbers are lower.
_HIGH = 400
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
        high = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in self.descriptors]
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
            is_own = forks.is_own_user(connection)
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
            forks.send_number(connection, pid, process)
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
            forks.send_number(connection, status if by_itself else -status)
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
    cores.limit_threads()
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
