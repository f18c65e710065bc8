"""The agent's end of the socket to a guard; `guard.py` has the other one.

Both sides send JSON objects, one a line. The agent asks (`do`), the guard reports (`is`):

    {"do": "start", "attempt": 1, "command": [...], "cwd": "", "env": {...}}
    {"do": "stop", "grace": 30}     SIGTERM to the program, SIGKILL to all of it after the grace
    {"do": "kill"}
    {"do": "exit", "code": 0, "message": ""}    the guard writes the message, and ends
    {"is": "ready", "attempt": 0, "running": false, "pid": 0, "ended": null}
    {"is": "started", "pid": 7}
    {"is": "failed", "code": 127, "message": "cannot start ..."}
    {"is": "line", "text": "{...}", "time": 1.5}    a line of output that is an object with a step
    {"is": "active"}                there was output; at most one a second
    {"is": "signal", "number": 15}  the guard was asked to end
    {"is": "ended", "attempt": 1, "code": -9, "last": ["last lines"]}

`{"is": "gone"}` is put here when the connection ends, and `{"is": "wake"}` by this process.
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
# So many lines wait while the agent is at a slow store; then each new one replaces the oldest.
MOST_LINES = 2000
Message = dict[str, Any]
log = logging.getLogger(__name__)


class Link:
    """A socket in the exchange folder; one guard at a time is connected."""

    def __init__(self, folder: Path) -> None:
        """Copy the guard into the folder, then listen; raises `UserError`."""
        self._place = folder / guard.SOCKET
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # The queue has one message without text for each of them.
        self._lines: deque[Message] = deque()
        self._counting = threading.Lock()
        self._dropped = 0
        self._connection: socket.socket | None = None
        self._is_free = threading.Event()
        self._is_free.set()
        with report_errors(f"listen at {self._place}"):
            folder.mkdir(parents=True, exist_ok=True)
            staged = folder / f"{GUARD_FILE}.{os.getpid()}"
            shutil.copyfile(guard.__file__, staged)
            staged.replace(folder / GUARD_FILE)
            self._place.unlink(missing_ok=True)
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            # The socket appears under its name when it is listened at.
            new = folder / f"{guard.SOCKET}.{os.getpid()}"
            new.unlink(missing_ok=True)
            self._listener.bind(guard.reach(str(new)))
            # The program's container may have another user.
            new.chmod(0o666)
            self._listener.listen()
            new.replace(self._place)
        threading.Thread(target=self._accept, name="guard", daemon=True).start()

    def start_guard(self, environment: dict[str, str], folder: str) -> subprocess.Popen[bytes]:
        """Start a guard as a child of this process, with its output."""
        words = [sys.executable, "-IS", str(self._place.with_name(GUARD_FILE))]
        options = ["--socket", str(self._place), "--parent", str(os.getpid())]
        return subprocess.Popen(
            [*words, *options], env=environment, cwd=folder, stdin=subprocess.DEVNULL
        )

    def receive(self, seconds: float | None) -> Message | None:
        """Return the next message; None if there is none within some seconds."""
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
        """Return whether a guard is connected."""
        return self._connection is not None

    def wake(self) -> None:
        """Let `receive` return; from any thread or signal handler."""
        self._messages.put({"is": "wake"})

    def wait_gone(self, seconds: float) -> bool:
        """Return whether no guard is connected, after some seconds at the latest."""
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
        """Add a message of the guard; from any thread."""
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
                    "%d lines with metrics were passed over: the program wrote them faster than "
                    "they were read",
                    self._dropped,
                )
            self._messages.put({"is": "gone"})
