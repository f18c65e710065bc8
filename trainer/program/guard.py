"""The guard of a program: starts the program, relays its output and kills its processes.

This file runs in the user's image, which needs no package of this project: it imports only the
standard library and uses only the syntax of Python 3.8. The agent, a process of this project,
listens on a Unix socket and makes the decisions. The two send JSON objects, one per line (see
`link.py`):

    python3 guard.py --socket FOLDER/guard.sock [--reconnect SECONDS] [--termination FILE]

The program runs in its own session. When it ends, all processes that it started are killed, even if
they left its process group: as a child subreaper, the guard adopts orphaned descendants. If the
agent is gone for `--reconnect` seconds (0: immediately), the program is stopped and the guard exits
with code 138, which requests a restart.

If the guard itself is killed, the kernel kills the program. The processes that the program had
started have the variable `MARK` in their environment, and are killed by the next guard of the same
folder or by `--sweep`.

Limitations: if the launcher is killed too, such processes continue until the run is started again.
A process that has cleared its environment or runs as another user continues until it exits.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from typing import Any, Callable, Dict, List  # noqa: UP035

SOCKET, LOCK = "guard.sock", "guard.lock"
#: Environment variable of all processes of a program. Its value identifies the guard's folder.
MARK = "FLOTILLA_GUARD"
BEGIN_AGAIN, NOT_EXECUTABLE, NOT_FOUND = 138, 126, 127
# The kernel limits the path of a socket to 108 bytes.
LONGEST_PATH = 100
LONGEST_LINE = 1 << 16
MOST_UNSENT = 1 << 20
LAST_LINES, LAST_LETTERS = 20, 500
POLL_SECONDS, ACTIVE_SECONDS, DRAIN_SECONDS, PAUSE_SECONDS = 0.25, 1.0, 2.0, 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

Message = Dict[str, Any]  # noqa: UP006


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process, if the system supports it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has exited."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reach(path: str) -> str:
    """Return a path to a socket that is short enough to bind or connect to; see unix(7).

    If `path` is too long, this opens its folder, and keeps it open until the process exits.
    """
    if len(os.fsencode(path)) <= LONGEST_PATH:
        return path
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    return f"/proc/self/fd/{folder}/{os.path.basename(path)}"


def list_processes() -> List[int]:  # noqa: UP006
    """Return the ids of all processes visible to this one, or an empty list without `/proc`."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name[:1] in "123456789"]
    return []


def read_about(pid: int, name: str) -> bytes:
    """Return the content of a file in `/proc/PID`, or empty bytes if it cannot be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def is_child(pid: int) -> bool:
    """Return whether a process is a child of this one. A zombie counts too."""
    # The name of the process is in parentheses and may contain spaces.
    fields = read_about(pid, "stat").rpartition(b")")[2].split()
    return len(fields) > 1 and int(fields[1]) == os.getpid()


def kill_all(group: int) -> None:
    """Kill a process group and all children of this process. Give up after `DRAIN_SECONDS`."""
    with contextlib.suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    _kill(is_child)


def kill_marked(folder: str) -> None:
    """Kill the processes that an earlier guard of this folder has left."""
    wanted = f"{MARK}={mark_of(folder)}".encode()
    _kill(lambda pid: wanted in read_about(pid, "environ").split(b"\0"))


def mark_of(folder: str) -> str:
    """Return an identifier of a folder: device, inode and path. Containers may share the path."""
    there = os.stat(folder)
    return f"{there.st_dev}:{there.st_ino}:{folder}"


def _kill(is_meant: Callable[[int], bool]) -> None:
    end = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < end:
        left = [pid for pid in list_processes() if is_meant(pid)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        # `waitpid` waits only for children, so other processes are polled.
        select.select([], [], [], PAUSE_SECONDS)


class Output:
    """A relay of the program's output, which finds the lines that report a step."""

    def __init__(self) -> None:
        """Start without output."""
        self.last: list[str] = []
        self._line = b""

    def take(self, data: bytes) -> list[str]:
        """Relay bytes, and return the complete lines that report a step."""
        self._pass_on(data)
        *lines, rest = (self._line + data).split(b"\n")
        self._line = rest[:LONGEST_LINE]
        return [text for text in map(self._end_line, lines) if text]

    def finish(self) -> None:
        """Process a last line that does not end with a newline."""
        self._end_line(self._line)
        self._line = b""

    def _pass_on(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(1, data) :]
            except OSError:
                # A full disk or a closed pipe must not end the program.
                return

    def _end_line(self, line: bytes) -> str:
        # A progress bar overwrites its line after each carriage return, so keep the last part.
        visible = line.rstrip(b"\r").rpartition(b"\r")[2] or line
        text = visible[:LONGEST_LINE].decode("utf-8", "replace").strip()
        if text:
            self.last = [*self.last[1 - LAST_LINES :], text[:LAST_LETTERS]]
        return text if is_step(text) else ""


def is_step(text: str) -> bool:
    """Return whether a line is a JSON object that has a step."""
    if not text.startswith("{") or 'step"' not in text:
        return False
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(tree, dict) and ("step" in tree or "global_step" in tree)


class Program:
    """A running program."""

    def __init__(self, message: Message, mark: str) -> None:
        """Start the program with `mark` in its environment. Raises `OSError`."""
        self.attempt = message.get("attempt", 0)
        self.deadline: float | None = None
        self.output = Output()
        reader, writer = os.pipe()
        try:
            self.process = subprocess.Popen(
                message["command"],
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                cwd=message.get("cwd") or None,
                env={**os.environ, **message.get("env", {}), MARK: mark},
                start_new_session=True,
                # The kernel kills the program if this process is killed.
                preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
            )
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self.reader = reader
        os.set_blocking(reader, False)

    def stop(self, grace: float) -> None:
        """Send SIGTERM. The guard kills the program after `grace` seconds."""
        if self.deadline is None:
            self.deadline = time.monotonic() + grace
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the program and all processes that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # Wait first, because this process adopts the program's children when the program exits.
        self.process.wait()
        kill_all(self.process.pid)


class Guard:
    """The event loop of this process, which runs the program for the agent."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Store the options of the command line."""
        self._options = options
        self._folder = os.path.dirname(os.path.abspath(options.socket))
        self._program: Program | None = None
        self._connection: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._incoming, self._unsent = b"", b""
        self._lost_at = time.monotonic()
        self._active_at = 0.0
        self._asked_to_end = 0
        self._code: int | None = None
        self._was_connected = False
        # The message about the end of the last program, for an agent that connects later.
        self._ended: Message | None = None

    def run(self) -> int:
        """Process the agent's messages until this process must exit, and return the exit code."""
        wakes, wake = os.pipe()
        for end in (wakes, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._handle)
        self._selector.register(wakes, selectors.EVENT_READ, "wake")
        while self._code is None:
            if self._connection is None:
                self._connect()
            if self._code is not None:
                break
            for key, _ in self._selector.select(POLL_SECONDS):
                self._serve(key)
            self._look()
        if self._program:
            self._program.kill()
        return self._code

    def _handle(self, number: int, _frame: Any) -> None:
        if number != signal.SIGCHLD:
            self._asked_to_end = number

    def _serve(self, key: Any) -> None:
        if key.data == "wake":
            os.read(key.fd, 4096)
        elif key.data == "output":
            self._read_output()
        elif key.data == "agent":
            self._read_agent()

    def _look(self) -> None:
        if self._asked_to_end:
            number, self._asked_to_end = self._asked_to_end, 0
            if self._connection:
                self._send({"is": "signal", "number": number})
            else:
                self._stop_alone(128 + number)
        program = self._program
        if program and program.deadline is not None and time.monotonic() > program.deadline:
            program.kill()
        if program and program.process.poll() is not None:
            self._end_program(program)
        self._flush()

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(reach(self._options.socket))
        except OSError:
            connection.close()
            if self._options.parent not in (0, os.getppid()):
                self._code = BEGIN_AGAIN
            waits = self._options.reconnect if self._was_connected else self._options.wait
            if time.monotonic() - self._lost_at > waits:
                self._stop_alone(BEGIN_AGAIN)
            return
        connection.setblocking(False)
        self._connection, self._was_connected = connection, True
        self._incoming = self._unsent = b""
        self._selector.register(connection, selectors.EVENT_READ, "agent")
        running = self._program
        self._send(
            {
                "is": "ready",
                "attempt": running.attempt if running else 0,
                "running": running is not None,
                "pid": running.process.pid if running else 0,
                "ended": self._ended,
            }
        )

    def _lose_agent(self) -> None:
        if self._connection:
            self._selector.unregister(self._connection)
            self._connection.close()
        self._connection, self._lost_at = None, time.monotonic()
        if not self._options.reconnect:
            self._code = BEGIN_AGAIN

    def _read_agent(self) -> None:
        try:
            data = self._connection.recv(1 << 16) if self._connection else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_agent()
            return
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line.decode()))

    def _obey(self, message: Message) -> None:
        wanted, program = message.get("do"), self._program
        if wanted == "start":
            self._start(message)
        elif wanted == "stop" and program:
            program.stop(float(message.get("grace", 0)))
        elif wanted == "kill" and program:
            program.kill()
        elif wanted == "exit":
            self._write_termination(str(message.get("message", "")))
            self._code = int(message["code"])

    def _send(self, message: Message) -> None:
        # If the agent does not read, drop lines instead of blocking the program.
        if len(self._unsent) < MOST_UNSENT or message["is"] not in ("line", "active"):
            self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        while self._unsent and self._connection:
            try:
                sent = self._connection.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self._lose_agent()
                return
            self._unsent = self._unsent[sent:]

    def _start(self, message: Message) -> None:
        if self._program:
            self._send({"is": "failed", "code": 1, "message": "a program is already running"})
            return
        try:
            self._program = Program(message, mark_of(self._folder))
        except OSError as error:
            self._send(_failure(message, error))
            return
        self._ended = None
        self._selector.register(self._program.reader, selectors.EVENT_READ, "output")
        self._send({"is": "started", "pid": self._program.process.pid})

    def _read_output(self) -> bool:
        program = self._program
        if not program:
            return False
        try:
            data = os.read(program.reader, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            if program.reader in self._selector.get_map():
                self._selector.unregister(program.reader)
            return False
        for text in program.output.take(data):
            self._send({"is": "line", "text": text, "time": time.time()})
        if time.monotonic() - self._active_at >= ACTIVE_SECONDS:
            self._active_at = time.monotonic()
            self._send({"is": "active"})
        return True

    def _end_program(self, program: Program) -> None:
        code = program.process.wait()
        kill_all(program.process.pid)
        while self._read_output():
            pass
        program.output.finish()
        if program.reader in self._selector.get_map():
            self._selector.unregister(program.reader)
        os.close(program.reader)
        self._program = None
        last = program.output.last
        self._ended = {"is": "ended", "attempt": program.attempt, "code": code, "last": last}
        self._send(self._ended)

    def _stop_alone(self, code: int) -> None:
        if self._program:
            self._program.stop(self._options.grace)
            end = time.monotonic() + self._options.grace
            while self._program.process.poll() is None and time.monotonic() < end:
                # A program whose output pipe is full cannot exit until the pipe is read.
                self._selector.select(POLL_SECONDS)
                self._read_output()
        self._code = code

    def _write_termination(self, message: str) -> None:
        if not self._options.termination or not message:
            return
        text = " ".join(message.split())[:4000]
        with contextlib.suppress(OSError), open(self._options.termination, "wb") as file:
            file.write(f"{text}\n".encode())


def _failure(message: Message, error: OSError) -> Message:
    word, folder = message["command"][0], message.get("cwd") or "."
    if not os.path.isdir(folder):
        what = f"program.working_dir: there is no folder {folder}"
        return {"is": "failed", "code": NOT_FOUND, "message": what}
    code = NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE
    reason = os.strerror(error.errno) if error.errno else str(error)
    what = f"cannot start {word}: {reason}; check program.command and the image"
    return {"is": "failed", "code": code, "message": what}


def hold_lock(path: str) -> Any:
    """Wait until an earlier guard of this task has exited. Lock the file until this guard exits."""
    file = open(path, "wb")  # noqa: SIM115
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def main() -> None:
    """Parse the command line and run a program."""
    parser = argparse.ArgumentParser(prog="guard.py")
    parser.add_argument("--socket", required=True)
    for name, default, words in (
        ("--wait", 120.0, "seconds to wait for the first connection to the agent"),
        ("--reconnect", 0.0, "seconds to wait for a new connection to the agent"),
        ("--grace", 30.0, "seconds for the program to exit if there is no agent"),
    ):
        parser.add_argument(name, type=float, default=default, help=words)
    parser.add_argument("--termination", default="", help="file of the termination message")
    parser.add_argument(
        "--parent", type=int, default=0, help="id of the parent process, with which the guard exits"
    )
    parser.add_argument("--umask", default="", help="umask of the program's files, in octal")
    parser.add_argument("--sweep", action="store_true", help="kill remaining processes, and exit")
    parser.add_argument("command", nargs="*", help="shown in the process list")
    options = parser.parse_args()
    if options.umask:
        os.umask(int(options.umask, 8))
    folder = os.path.dirname(os.path.abspath(options.socket))
    lock = hold_lock(os.path.join(folder, LOCK))
    kill_marked(folder)
    if options.sweep:
        return
    adopt_orphans()
    code = Guard(options).run()
    # The lock file must stay open until the process has exited.
    assert lock
    os._exit(code)


if __name__ == "__main__":
    main()
