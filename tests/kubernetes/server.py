"""A small Kubernetes API server over HTTP, which serves jobs, pods, logs, events and more."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes import pods, rbac
from tests.kubernetes.control import Control
from tests.kubernetes.faults import SILENCE, Fault, Faults
from tests.kubernetes.logs import Logs, stamp
from tests.kubernetes.sidecars import log_of
from tests.kubernetes.store import NotServedError, RefusedError, Store, Tree, selected

PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[a-z0-9.-]+)/(?P<version>v[^/]+))"
    r"/namespaces/(?P<namespace>[^/]+)"
    r"/(?P<kind>tfjobs|jobsets|jobs|leases|services|pods|events|secrets|configmaps|persistentvolumeclaims|serviceaccounts"
    r"|resourcequotas|limitranges|localqueues|networkpolicies)"
    r"(?:/(?P<name>[^/]+)(?:(?P<log>/log)|(?P<eviction>/eviction))?)?"
)
POLL_SECONDS = 0.5


class Server(ThreadingHTTPServer):
    """The API on a loopback port, served until the end of the `with` block."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = Store()
        self.faults = Faults(self.store.changed)
        self.logs = Logs(self.store.changed)
        self.control = Control(self.store)
        self.requests: list[str] = []
        # Request line, headers and body of each request, without tokens.
        self.received: list[bytes] = []
        self.tokens: set[str] = set()
        # A stream ends when this number changes.
        self.generation = 0
        self.closing = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def drop_streams(self) -> None:
        """Break every watch and every followed log in the middle of a line."""
        with self.store.changed:
            self.generation += 1
            self.store.changed.notify_all()

    def go_down(self, *, cuts_streams: bool = True) -> None:
        """Refuse new connections; open streams end too, unless `cuts_streams` is false."""
        with self.store.changed:
            self.faults.down = True
        if cuts_streams:
            self.drop_streams()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because tests kill clients on purpose."""

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.closing = True
        self.drop_streams()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body are two writes. With Nagle's algorithm, the second would wait up to 40 ms for
    # the acknowledgement of the first.
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        request = f"{self.command} {self.path}"
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        body = json.loads(content or b"{}")
        rest = [each for each in self.headers.items() if each[0].lower() != "authorization"]
        with self.server.store.changed:
            self.server.requests.append(request)
            self.server.received.append(f"{request} {rest} ".encode() + content)
            self.server.tokens.add(self._token())
            self.server.store.changed.notify_all()
        fault = self.server.faults.of(request)
        if fault and not fault.late:
            return self._fail(fault)
        try:
            answer = self._route(body)
        except RefusedError as error:
            return self._send(error.code, error.status)
        except NotServedError:
            return self._send_text(404, "404 page not found\n", "text/plain; charset=utf-8")
        if fault:
            return self._fail(fault)
        if answer is not None:
            self._send(200, answer)
        return None

    # `BaseHTTPRequestHandler` requires these names.
    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815

    def _fail(self, fault: Fault) -> None:
        status = fault.status
        if status == SILENCE:
            with self.server.store.changed:
                self.server.store.changed.wait_for(lambda: self.server.closing)
        if status in (0, SILENCE):
            self.close_connection = True
            return
        status_object = {
            "kind": "Status",
            "code": status,
            "reason": "Fault",
            "message": self._forbidden() if status == HTTPStatus.FORBIDDEN else "on demand",
        }
        if fault.echoes:
            status_object["message"] = f"denied: {dict(self.headers)}"
        self._send(status, status_object, fault.headers)

    def _forbidden(self) -> str:
        parts = urlsplit(self.path)
        found = PATH.fullmatch(parts.path)
        user = self.server.control.user_of(self._token())
        if not found:
            return f'forbidden: User "{user}" cannot {self.command.lower()} path "{parts.path}"'
        name = found["name"] or ""
        verb = rbac.verb_of(self.command, name, watches="watch=" in parts.query)
        resource = f"{found['kind']}{found['log'] or ''}"
        return str(rbac.refusal(user, verb, resource, found["namespace"], name))

    def _send(self, code: int, tree: Tree, headers: dict[str, str] | None = None) -> None:
        self._send_text(code, json.dumps(tree), "application/json", headers)

    def _send_text(
        self, code: int, text: str, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _route(self, body: Tree) -> Tree | None:
        """Return the response to a request, or None if the response was a stream."""
        parts = urlsplit(self.path)
        found = PATH.fullmatch(parts.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        if not found:
            token = self._token()
            return self.server.control.answer(self.command, parts.path, body, token)
        kind, namespace, name = found["kind"], found["namespace"], found["name"]
        # Authorization comes first, so that users without permission do not learn what is served.
        self._authorize(found, query)
        self.server.control.check_served(found["group"] or "", found["version"] or "", kind)
        if found["log"]:
            return self._log(namespace, name, query)
        if self.command == "GET" and not name:
            if query.get("watch") in ("true", "True"):
                return self._watch(kind, namespace, query)
            return self._list(kind, namespace, query)
        if self.command == "POST":
            self.server.control.check_namespace(namespace)
            body = self.server.control.admitted(kind, body, query)
        if kind == "tfjobs" and self.command in ("POST", "PATCH"):
            self.server.control.call_webhook()
        if self.command == "POST" and query.get("dryRun") == "All":
            return self.server.store.admitted(kind, namespace, body)
        return (
            self._evict(namespace, name)
            if found["eviction"]
            else self._object(kind, namespace, name, body, query)
        )

    def _token(self) -> str:
        return (self.headers.get("authorization") or "").removeprefix("Bearer ")

    def _authorize(self, asked: re.Match[str], query: dict[str, str]) -> None:
        control = self.server.control
        user, name = control.user_of(self._token()), asked["name"] or ""
        watches = self.command == "GET" and query.get("watch") in ("true", "True")
        verb = rbac.verb_of(self.command, name, watches=watches)
        resource = f"{asked['kind']}{asked['log'] or asked['eviction'] or ''}"
        if not control.may(user, verb, resource):
            raise rbac.refusal(user, verb, resource, asked["namespace"], name)

    def _object(
        self, kind: str, namespace: str, name: str, body: Tree, query: dict[str, str]
    ) -> Tree:
        store = self.server.store
        if self.command == "POST":
            return store.create(kind, namespace, body)
        if self.command == "PATCH":
            if kind == "jobsets":
                check = self.server.control.jobsets.changed
                return store.patch(kind, namespace, name, body, check)
            return store.patch(kind, namespace, name, body)
        if self.command == "DELETE":
            body = {**query, **body}
            uid = (body.get("preconditions") or {}).get("uid", "")
            grace = body.get("gracePeriodSeconds")
            # By default, the API does not delete the pods of a deleted Job.
            default = "Orphan" if kind == "jobs" else "Background"
            propagation = body.get("propagationPolicy") or default
            if grace is not None:
                store.delete(kind, namespace, name, uid, int(grace))
            else:
                store.delete_as(propagation, kind, namespace, name, uid)
            return {"kind": "Status", "status": "Success"}
        return store.get(kind, namespace, name)

    def _evict(self, namespace: str, name: str) -> Tree:
        """Delete a pod with its grace period, as a node drain does."""
        store = self.server.store
        with store.changed:
            pod = store.get("pods", namespace, name)
            pods.disrupted(store, pod, "EvictionByEvictionAPI", "Eviction API: evicting")
            store.delete("pods", namespace, name)
        return {"kind": "Status", "status": "Success"}

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> Tree:
        store = self.server.store
        with store.changed:
            selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
            return {
                "metadata": {"resourceVersion": str(store.version())},
                "items": store.all(kind, namespace, *selectors),
            }

    def _watch(self, kind: str, namespace: str, query: dict[str, str]) -> None:
        store = self.server.store
        selectors = query.get("labelSelector", ""), query.get("fieldSelector", "")
        version = int(query.get("resourceVersion") or store.version())
        store.since(version)
        end = time.monotonic() + float(query.get("timeoutSeconds", 300))
        with self._stream() as (generation, write):
            while time.monotonic() < end:
                with store.changed:
                    while store.version() == version and self._is_open(generation, end):
                        store.changed.wait(POLL_SECONDS)
                    if not self._is_open(generation, end):
                        break
                    try:
                        events = store.since(version)
                    except RefusedError as error:
                        write(json.dumps({"type": "ERROR", "object": error.status}) + "\n")
                        return
                for version, event, its_kind, tree in events:  # noqa: B007
                    same = its_kind == kind and tree["metadata"]["namespace"] == namespace
                    if same and selected(tree, *selectors):
                        write(json.dumps({"type": event, "object": tree}) + "\n")

    def _log(self, namespace: str, name: str, query: dict[str, str]) -> None:
        store = self.server.store
        pod = store.get("pods", namespace, name)
        name_of_log, states = _container_of(pod, query.get("container", ""))
        if not states or "waiting" in states[0]["state"]:
            raise RefusedError(400, "BadRequest", f'container in pod "{name}" is waiting to start')
        start = states[0]["restartCount"] - (query.get("previous") in ("true", "True"))
        log = self.server.logs.ask(name_of_log, start)
        if log.lost:
            lost = f"unable to retrieve container logs for containerd://{'9c1b' * 16}"
            return self._send_text(200, lost, "text/plain")
        # The kubelet ignores fractions of a second in `sinceTime`.
        since = query.get("sinceTime", "")[:19]
        follow = query.get("follow") in ("true", "True")
        position = 0
        with self._stream() as (generation, write):
            while self._is_open(generation, None):
                with store.changed:
                    new = log.lines[position:]
                    ended = log.ended or not follow or not self._exists(pod)
                    if not new and not ended:
                        store.changed.wait(POLL_SECONDS)
                        continue
                position += len(new)
                for at, text in new:
                    if stamp(at)[:19] >= since:
                        write(f"{stamp(at)} {text}\n")
                if ended and not log.lines[position:]:
                    return
            # Break the connection in the middle of a line.
            for at, text in log.lines[position : position + 1]:
                write(f"{stamp(at)} {text}"[:20])

    def _exists(self, pod: Tree) -> bool:
        meta = pod["metadata"]
        with suppress(RefusedError):
            found = self.server.store.get("pods", meta["namespace"], meta["name"])
            return bool(found["metadata"]["uid"] == meta["uid"])
        return False

    def _is_open(self, generation: int, end: float | None) -> bool:
        late = end is not None and time.monotonic() >= end
        return generation == self.server.generation and not late

    def _stream(self) -> Stream:
        return Stream(self)


def _container_of(pod: Tree, name: str) -> tuple[str, list[Tree]]:
    """Return the key of a container's log, and the container's status."""
    status, uid = pod.get("status", {}), pod["metadata"]["uid"]
    if name in [each["name"] for each in pod["spec"].get("initContainers", [])]:
        found = [each for each in status.get("initContainerStatuses", []) if each["name"] == name]
        return log_of(uid, name), found
    return uid, status.get("containerStatuses", [])


class Stream:
    """A chunked response; a broken stream ends without the last chunk."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._generation = handler.server.generation

    def __enter__(self) -> tuple[int, Any]:
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "application/json")
        self._handler.send_header("Transfer-Encoding", "chunked")
        # No other response follows a stream on its connection.
        self._handler.send_header("Connection", "close")
        self._handler.end_headers()
        return self._generation, self._write

    def _write(self, text: str) -> None:
        data = text.encode()
        self._handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self._handler.wfile.flush()

    def __exit__(self, *_error: object) -> None:
        self._handler.close_connection = True
        if self._generation == self._handler.server.generation:
            with suppress(OSError):
                self._handler.wfile.write(b"0\r\n\r\n")
