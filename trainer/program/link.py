"""The agent's end of the socket that connects the agent to the guard (`guard.py`).

Both sides send JSON objects, one per line. The agent sends commands (`do`), and the guard sends
reports (`is`):

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
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla.trainer.program import guard
from flotilla.trainer.runtime.json_records import parse_mapping
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
