"""What the agent exchanges with its guard, by a socket, and with the agents of other workers.

The socket connects the agent to the guard (`guard.py`). Both sides send JSON objects, one per line.
The agent sends commands (`do`), and the guard sends reports (`is`):

    {"do": "start", "attempt": 1, "command": [...], "cwd": "", "env": {...}}
    {"do": "stop", "grace": 30}     SIGTERM to the program; after the grace period, SIGKILL to all
    {"do": "kill"}
    {"do": "exit", "code": 0, "message": ""}    the guard writes the termination message and exits
    {"is": "ready", "attempt": 0, "running": false, "pid": 0, "ended": null}
    {"is": "started", "pid": 7}
    {"is": "failed", "code": 127, "message": "cannot start ..."}
    {"is": "line", "text": "{...}", "time": 1.5}    a line of output that reports a step
    {"is": "active"}                there was output; sent at most once per second
    {"is": "signal", "number": 15}  the guard received a signal to exit
    {"is": "ended", "attempt": 1, "code": -9, "last": ["last lines"]}

The agent adds `{"is": "gone"}` to the received messages when the connection ends, and
`{"is": "wake"}` to wake itself.

If there are neither a chief nor parameter servers, all workers start together, or none does. Each
worker except the leader writes a new ticket next to the checkpoints when it starts. The leader
starts an attempt when each of these workers has a ticket that the previous attempt did not use. It
then writes the checkpoint and these tickets to a file, so that no two tasks ever start from
different checkpoints. A worker whose ticket is not in the file waits. The leader restarts if it
finds a new ticket of a worker, and a worker restarts if it finds a new attempt.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.topology import Task
from flotilla.trainer.program import guard
from flotilla.trainer.runtime.errors import ClusterLostError
from flotilla.trainer.runtime.json_records import parse_mapping, read_record
from flotilla.trainer.storage.errors import report_errors

GUARD_FILE = "guard.py"
# Maximum number of lines that wait for the agent. A further line replaces the oldest one.
MOST_LINES = 2000
Message = dict[str, Any]
log = logging.getLogger(__name__)


class Link:
    """A socket in the exchange folder, to which a single guard connects."""

    def __init__(self, folder: Path) -> None:
        """Copy the guard program into the folder, then listen. Raises `UserError`."""
        self._place = folder / guard.SOCKET
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # Lines that wait for the agent. The queue of messages has a placeholder for each line.
        self._lines: deque[Message] = deque()
        self._counting = threading.Lock()
        self._dropped = 0
        self._connection: socket.socket | None = None
        self._is_free = threading.Event()
        self._is_free.set()
        with report_errors(f"listen on {self._place}"):
            folder.mkdir(parents=True, exist_ok=True)
            staged = folder / f"{GUARD_FILE}.{os.getpid()}"
            shutil.copyfile(guard.__file__, staged)
            staged.replace(folder / GUARD_FILE)
            self._place.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # Rename the socket only when it is ready, so that a guard never finds it too early.
            new = folder / f"{guard.SOCKET}.{os.getpid()}"
            new.unlink(missing_ok=True)
            self._listener.bind(guard.reach(str(new)))
            # Allow all users, because the guard may run as another user in its container.
            new.chmod(0o666)
            self._listener.listen()
            new.replace(self._place)
        threading.Thread(target=self._accept, name="guard", daemon=True).start()

    def start_guard(self, environment: dict[str, str], folder: str) -> subprocess.Popen[bytes]:
        """Start a guard as a child of this process. It writes to the output of this process."""
        words = [sys.executable, "-IS", str(self._place.with_name(GUARD_FILE))]
        options = ["--socket", str(self._place), "--parent", str(os.getpid())]
        return subprocess.Popen(
            [*words, *options], env=environment, cwd=folder, stdin=subprocess.DEVNULL
        )

    def receive(self, seconds: float | None) -> Message | None:
        """Return the next message, or None if there is none within `seconds`."""
        try:
            found = self._messages.get(timeout=seconds)
        except queue.Empty:
            return None
        if found["is"] != "line":
            return found
        with self._counting:
            return self._lines.popleft()

    @property
    def is_connected(self) -> bool:
        """Whether a guard is connected."""
        return self._connection is not None

    def wake(self) -> None:
        """Wake up `receive`. Any thread or signal handler may call this method."""
        self._messages.put({"is": "wake"})

    def wait_gone(self, seconds: float) -> bool:
        """Wait up to `seconds` for the guard to disconnect. Return whether none is connected."""
        return self._is_free.wait(seconds)

    def send(self, **message: Any) -> None:
        """Send a message to the guard, if one is connected."""
        if self._connection:
            with suppress(OSError):
                self._connection.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """Close the connection and remove the socket."""
        with suppress(OSError):
            self._place.unlink(missing_ok=True)
        for each in (self._connection, self._listener):
            if each:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def put(self, message: Message) -> None:
        """Add a message, as if the guard had sent it. Any thread may call this method."""
        if message["is"] != "line":
            self._messages.put(message)
            return
        with self._counting:
            self._lines.append(message)
            if len(self._lines) > MOST_LINES:
                self._lines.popleft()
                self._dropped += 1
                return
        self._messages.put({"is": "line"})

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connection = connection
            self._is_free.clear()
            with connection, connection.makefile("rb") as lines, suppress(OSError):
                for line in lines:
                    with suppress(ValueError):
                        self.put(parse_mapping(line))
            self._connection = None
            self._is_free.set()
            if self._dropped:
                log.warning(
                    "skipped %d lines of metrics, because the program wrote them faster than "
                    "Flotilla could read them",
                    self._dropped,
                )
            self._messages.put({"is": "gone"})


_FOLDER, _FILE = "program", "attempt.json"
# Polling intervals in seconds. Polling is needed, because a store sends no notifications.
LOCAL_SECONDS, REMOTE_SECONDS = 0.5, 3.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt: the checkpoint that it starts from, and the tickets of its workers."""

    number: int
    checkpoint: str = ""
    tickets: dict[str, str] = field(default_factory=dict)


class Attempts:
    """Starts, joins and checks the attempts of a run on behalf of one task."""

    def __init__(self, job: Job, this: Task, others: Sequence[Task]) -> None:
        """Store the run and `others`, the workers other than the leader."""
        self._folder = storage.join(job.checkpoints, _FOLDER)
        self._this, self._others = str(this), [str(each) for each in others]
        self.seconds = LOCAL_SECONDS if storage.local_path(self._folder) else REMOTE_SECONDS
        self.current = Attempt(number=0)

    def lead(self, checkpoint: str, wait: Callable[[float], object]) -> Attempt:
        """Wait until all workers have new tickets, then start an attempt. Raises `UserError`."""
        before = self._read() or Attempt(number=0)
        gathering = Attempt(number=before.number + 1)
        if self._others:
            # Tell workers that are still running the previous attempt that it has ended.
            self._write(_FILE, asdict(gathering))
        tickets: dict[str, str] = {}
        while len(tickets) < len(self._others):
            tickets = self._read_tickets(set(before.tickets.values()))
            if len(tickets) < len(self._others):
                wait(self.seconds)
        self.current = Attempt(number=gathering.number, checkpoint=checkpoint, tickets=tickets)
        self._write(_FILE, asdict(self.current))
        return self.current

    def join(self, wait: Callable[[float], object]) -> Attempt:
        """Write a new ticket, and wait for an attempt that lists it. Raises `UserError`."""
        own = secrets.token_hex(8)
        self._write(f"{self._this}.json", {"ticket": own})
        while True:
            found = self._read()
            if found and found.tickets.get(self._this) == own:
                self.current = found
                return found
            wait(self.seconds)

    def check(self) -> None:
        """Raise `ClusterLostError` if a new attempt began or, for a leader, a worker restarted."""
        if self._this in self.current.tickets:
            found = self._read()
            if found and found.number != self.current.number:
                raise ClusterLostError("a new attempt has begun; this worker restarts to join it")
            return
        there = self._read_tickets(set())
        for name, ticket in self.current.tickets.items():
            if there.get(name, ticket) != ticket:
                raise ClusterLostError(f"{name} was restarted, so all workers restart")

    def _read(self) -> Attempt | None:
        try:
            return read_record(Attempt, storage.read_bytes(storage.join(self._folder, _FILE)))
        except storage.Missing:
            return None

    def _read_tickets(self, used: set[str]) -> dict[str, str]:
        found = {}
        for name in self._others:
            with suppress(storage.Missing, ValueError):
                tree = parse_mapping(storage.read_bytes(storage.join(self._folder, f"{name}.json")))
                if isinstance(ticket := tree.get("ticket"), str) and ticket not in used:
                    found[name] = ticket
        return found

    def _write(self, name: str, tree: Mapping[str, Any]) -> None:
        storage.write_bytes(storage.join(self._folder, name), json.dumps(tree).encode())
