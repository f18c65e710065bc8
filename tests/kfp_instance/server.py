"""A fake KFP instance over HTTP: the part of the API of KFP 2.17 that the client uses."""

from __future__ import annotations

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.kfp_instance import api
from tests.kfp_instance.shapes import check, with_text
from tests.kfp_instance.store import RefusedError, Store
from tests.kubernetes.faults import TRICKLE, Fault, Faults

GRPC_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14}
TYPE = "type.googleapis.com/ml_pipelines.Status"
UPLOADED = re.compile(rb'name="uploadfile".*?\r\n\r\n(.*)\r\n--', re.DOTALL)


class Instance(ThreadingHTTPServer):
    """The API on a loopback port, served until the end of the `with` block.

    Attributes:
        token: the bearer token that requests must send; empty if none is required.
        multi_user: whether requests must specify a namespace.
        pipeline_store: where pipelines are stored: `database`, or `kubernetes` (fewer filters).
        has_ui: whether the server also acts as the UI, which forwards API requests.
        has_v1beta1: whether API version v1beta1 is served. It returns the nodes of a run; KFP 3
            drops it.
        received: request line, headers and body of each request, without credentials.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = Store()
        self.faults = Faults(threading.Condition())
        self.token = ""
        self.cookies = ""
        self.multi_user = False
        self.pipeline_store = "database"
        self.has_ui = False
        self.has_logs = True
        self.has_v1beta1 = True
        self.requests: list[str] = []
        self.received: list[bytes] = []
        self.closing = threading.Event()
        self.scheme = "http"

    def speak_tls(self, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.scheme = "https"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def asked(self, pattern: str) -> list[str]:
        return [request for request in self.requests if re.search(pattern, request)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because tests break connections on purpose."""

    def __enter__(self) -> Instance:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes. With Nagle's algorithm, the second would wait up to 40 ms for
    # the acknowledgement of the first.
    disable_nagle_algorithm = True
    server: Instance

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {self.path}"
        self.server.requests.append(request)
        secret = ("authorization", "cookie")
        rest = [each for each in self.headers.items() if each[0].lower() not in secret]
        self.server.received.append(f"{request} {rest} ".encode() + body)
        fault = self.server.faults.of(request)
        if fault is not None and not fault.late:
            self._fail(fault)
            return
        status, kind, content = self._done(body)
        if fault is not None:
            self._fail(fault)
            return
        self._send(status, kind, content)

    def _done(self, body: bytes) -> tuple[int, str, bytes]:
        try:
            self._authenticate()
            parts = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(parts.query).items()}
            path = unquote(parts.path)
            if path == "/" and self.server.has_ui:
                return 200, "text/html", api.UI
            if text := api.plain(self.server, path, query):
                return text
            for route in api.ROUTES:
                found = re.fullmatch(route.path, path)
                if found and route.method == self.command:
                    return self._handled(route, found.groups(), query, body)
            return self._refusal(404, "Not Found")
        except RefusedError as error:
            if "/upload" in self.path:
                return self._refused_upload(error)
            return self._refusal(error.status, str(error))

    def _handled(
        self, route: api.Route, words: tuple[str, ...], query: dict[str, str], body: bytes
    ) -> tuple[int, str, bytes]:
        sent: Any = None
        if route.takes == "file":
            found = UPLOADED.search(body)
            if found is None:
                raise RefusedError(400, "Failed to read pipeline from file")
            sent = found[1].decode()
        elif route.takes:
            try:
                sent = with_text(json.loads(body or b"{}"))
                check(sent, route.takes)
            except ValueError as error:
                # `ShapeError` is also a `ValueError`.
                raise RefusedError(400, f"proto: syntax error: {error}") from None
        with self.server.store.lock:
            tree = route.handle(self.server, *words, api.Request(query=query, sent=sent))
        # A bug in the fake must fail the test; the client would not detect it.
        check(tree, route.gives)
        return 200, "application/json", json.dumps(tree).encode()

    def _authenticate(self) -> None:
        token, cookies = self.server.token, self.server.cookies
        if token and self.headers.get("authorization") != f"Bearer {token}":
            got = self.headers.get("authorization", "")
            raise RefusedError(401, f"Request header error: token {got} is not valid")
        if cookies and self.headers.get("cookie") != cookies:
            raise RefusedError(401, "there is no user identity header")

    def _refusal(self, status: int, message: str) -> tuple[int, str, bytes]:
        details = [{"@type": TYPE, "error_message": message, "error_details": f"{message}\nstack"}]
        tree = {"code": GRPC_CODES.get(status, 2), "message": message, "details": details}
        return status, "application/json", json.dumps(tree).encode()

    def _refused_upload(self, error: RefusedError) -> tuple[int, str, bytes]:
        tree = {"error_message": str(error), "error_details": f"Error: {error}"}
        # Early errors occur before the content type is set, so the real server guesses it.
        kind = "text/plain; charset=utf-8" if error.status == 400 else "application/json"
        return error.status, kind, json.dumps(tree).encode()

    # `BaseHTTPRequestHandler` requires these names.
    do_GET = do_POST = do_DELETE = _answer  # noqa: N815

    def _fail(self, fault: Fault) -> None:
        if fault.status == TRICKLE:
            self._send(200, "application/json", b"", {"Transfer-Encoding": "chunked"})
            while not self.server.closing.wait(0.05):
                self.wfile.write(b"1\r\n \r\n")
        if fault.status < 0:
            self.server.closing.wait()
        if fault.status <= 0:
            self.close_connection = True
            return
        if fault.body:
            headers = {"Content-Type": "text/html", **fault.headers}
            self._send(fault.status, "", fault.body, headers)
        else:
            status, kind, content = self._refusal(fault.status, "a fault")
            self._send(status, kind, content, fault.headers)

    def _send(
        self, status: int, kind: str, content: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if "Transfer-Encoding" not in (headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
