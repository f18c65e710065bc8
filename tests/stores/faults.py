"""Faults between a client and a store, injected into a server's request handler."""

import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any


@dataclass
class Fault:
    """A fault that strikes the next `times` matching requests.

    Attributes:
        kind: a status code, or `drop` (the connection closes without a response), `lose` (the
            request is processed but its response is lost), `truncate` (the response ends half-way),
            `silence` (no data for `seconds`, then the transfer continues) or `mangle` (one byte
            changes during the transfer).
        method: the HTTP method, such as `GET`; any method if empty.
        path: a regular expression to search for in the path with its query.
        header: if not empty, only requests with this header match.
        times: number of faults.
        every: strike only every n-th matching request.
        seen: number of matching requests so far.
        seconds: length of the silence.
        body: the response body for a status code; None for a JSON error.
    """

    kind: int | str
    method: str = ""
    path: str = ""
    header: str = ""
    times: int = 1
    every: int = 1
    seen: int = 0
    seconds: float = 0.0
    body: bytes | None = None

    def strikes(self, handler: BaseHTTPRequestHandler) -> bool:
        """Count a request if it matches. Return whether the fault strikes it."""
        if self.times == 0 or self.method not in ("", handler.command):
            return False
        if not re.search(self.path, handler.path):
            return False
        if self.header and self.header not in handler.headers:
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        self.times -= 1
        return True


class Plan:
    """The faults, latency and request log of one server.

    An `unconditional` server ignores the preconditions of writes.
    """

    def __init__(self) -> None:
        self.latency = 0.0
        self.unconditional = False
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.before: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self.faults.extend(faults)

    def clear(self) -> None:
        with self._lock:
            self.faults.clear()

    def next_fault(self, handler: BaseHTTPRequestHandler) -> Fault | None:
        with self._lock:
            self.requests.append(f"{handler.command} {handler.path}")
            for fault in self.faults:
                if fault.strikes(handler):
                    return fault
        return None


class Faulty(BaseHTTPRequestHandler):
    """A mixin for request handlers, which applies the faults in `plan`. The server sets `plan`."""

    plan: Plan
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 1 << 16
    timeout = 120

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""

    def log_request(self, *args: Any, **named: Any) -> None:
        """Write no log."""

    def parse_request(self) -> bool:
        """Parse a request, and apply its fault, if any."""
        if not super().parse_request():
            return False
        if self.plan.unconditional:
            del self.headers["If-None-Match"]
            self.path = re.sub(r"ifGenerationMatch=\d+&?", "", self.path)
        if self.plan.before:
            self.plan.before(f"{self.command} {self.path}")
        fault = self.plan.next_fault(self)
        time.sleep(self.plan.latency)
        if fault is None:
            return True
        return self._fail(fault)

    def handle_expect_100(self) -> bool:
        """Request the body immediately, because the client waits for this response."""
        allowed = super().handle_expect_100()
        self.wfile.flush()
        return allowed

    def _fail(self, fault: Fault) -> bool:
        if isinstance(fault.kind, int):
            self._answer(fault.kind, fault.body)
            return False
        if fault.kind == "mangle":
            # Damage the first half, which contains the beginning of a manifest.
            sent = bytearray(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            sent[len(sent) // 4] ^= 1
            self.rfile = io.BytesIO(sent)
            self.close_connection = True
            return True
        if fault.kind == "silence":
            time.sleep(fault.seconds)
            return True
        if fault.kind == "drop":
            self._hang_up()
            return False
        self.wfile = _Torn(self.wfile, whole=0 if fault.kind == "lose" else 1)  # type: ignore[assignment]
        self.close_connection = True
        return True

    def _answer(self, status: int, body: bytes | None) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        reason = {"code": status, "message": "injected", "errors": [{"reason": "injected"}]}
        if body is None:
            body = b"" if self.command == "HEAD" else json.dumps({"error": reason}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Close the connection, even if the peer has already closed it."""
        try:
            super().finish()
        except OSError:
            self.rfile.close()
            with suppress(OSError):
                self.wfile.close()


class _Torn:
    """A stream that passes on the headers and half of the body, or nothing if `whole` is 0."""

    def __init__(self, file: Any, *, whole: int) -> None:
        self._file = file
        self._whole = whole
        self.closed = False

    def write(self, data: bytes) -> int:
        if not self._whole:
            return len(data)
        head, mark, body = bytes(data).partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/"):
            self._file.write(head + mark + body[: len(body) // 2])
        else:
            self._file.write(data[: len(data) // 2])
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self.closed = True
        self._file.close()
