"""A Google Cloud Storage server: gcp-storage-emulator with the features that it lacks.

It lacks threads, persistent connections, `ifGenerationMatch`, paged lists, repeated upload parts,
and speed, because it rewrites all metadata for each object.
"""

import functools
import http.server
import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlparse

from gcp_storage_emulator import server as emulator
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers.objects import _checksums, _make_object_resource
from gcp_storage_emulator.storage import Storage

from tests.stores.faults import Faulty, Plan

_read_data = emulator._read_data


class PreconditionError(Exception):
    """The object does not have the requested generation."""


def _read_fast(handler: Any, query: Any) -> Any:
    """Read an upload in one piece. The emulator's parser takes 20 ms/MB and may drop a last CR."""
    kind = handler.headers.get("Content-Type") or ""
    if not kind.startswith("multipart/related"):
        return _read_data(handler, query)
    raw = emulator._decode_raw_data(emulator._read_raw_data(handler), handler)
    boundary = kind.split("boundary=", 1)[1].split(";")[0].strip().strip("\"'")
    separator = b"--" + boundary.encode()
    _, meta, content = raw.split(separator, 2)
    content = content[: content.rindex(separator)]
    newline = b"\r\n" if meta.startswith(b"\r\n") else b"\n"
    _, _, meta = meta[len(newline) :].partition(newline * 2)
    head, _, body = content[len(newline) :].partition(newline * 2)
    lines = head.decode().lower().splitlines()
    headers = dict(line.split(": ", 1) for line in lines if ": " in line)
    kind = headers.get("content-type", "application/octet-stream")
    return {"meta": json.loads(meta), "content": body[: -len(newline)], "content-type": kind}


class Objects(Storage):
    """Objects in memory, with preconditions. Every method is called under `lock`."""

    def __init__(self) -> None:
        super().__init__(use_memory_fs=True)
        self.lock = threading.RLock()
        self.wanted: str | None = None
        self._sessions: dict[str, str | None] = {}
        self._received: dict[str, bytearray] = {}

    def _write_config_to_file(self) -> None:
        """Keep metadata only in memory."""

    def _check(self, bucket: str, name: str, wanted: str | None) -> None:
        if wanted is None:
            return
        generation = "0"
        with suppress(NotFound):
            generation = str(self.get_file_obj(bucket, name)["generation"])
        if generation != wanted:
            raise PreconditionError

    def create_file(
        self, bucket: str, name: str, content: bytes, obj: dict[str, Any], file_id: str = ""
    ) -> None:
        wanted = self._sessions.get(file_id) if file_id else self.wanted
        self._check(bucket, name, wanted)
        super().create_file(bucket, name, content, obj)
        # The emulator returns `null` for a key that the real service omits.
        obj["size"] = str(len(content))

    def create_resumable_upload(self, bucket: str, name: str, obj: dict[str, Any]) -> str:
        self._check(bucket, name, self.wanted)
        made: str = super().create_resumable_upload(bucket, name, obj)
        session = f"{made}:{len(self._sessions)}"
        self.resumable[session] = obj
        self._sessions[session] = self.wanted
        self._received[session] = bytearray()
        return session

    def get_resumable_byte_count(self, file_id: str) -> int:
        return len(self._received.get(file_id, b""))

    def add_to_resumable_upload(
        self,
        file_id: str,
        content: bytes,
        total_size: int | None = None,
        expected_start: int | None = None,
    ) -> bytes | None:
        received = self._received[file_id]
        # A client may repeat a part that was received but whose response was lost.
        repeated = len(received) - (len(received) if expected_start is None else expected_start)
        received += (content or b"")[repeated:]
        if total_size is None or len(received) < total_size:
            return None
        return bytes(received)

    def delete_file(self, bucket: str, name: str) -> None:
        self._check(bucket, name, self.wanted)
        super()._hard_delete_file(bucket, name)


def _page_of(answer: bytes, query: dict[str, list[str]]) -> bytes:
    """Return the requested page of a list, because the emulator returns the whole list."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return answer
    tree = json.loads(body)
    start, size = int(query.get("pageToken", ["0"])[0]), int(query["maxResults"][0])
    items = tree.get("items", [])
    if start + size < len(items):
        tree["nextPageToken"] = str(start + size)
    body = json.dumps({**tree, "items": items[start : start + size]}).encode()
    length = re.compile(rb"(?i)(content-length: )[0-9]+")
    return length.sub(rb"\g<1>%d" % len(body), head) + b"\r\n\r\n" + body


class _Handler(Faulty, emulator.RequestHandler):
    def _go(self, method: str) -> None:
        # Read and write bodies without the lock, because a client may be slow or silent.
        incoming, outgoing = self.rfile, self.wfile
        self.rfile = io.BytesIO(incoming.read(int(self.headers.get("Content-Length") or 0)))  # type: ignore[assignment]
        self.wfile = io.BytesIO()  # type: ignore[assignment]
        query = parse_qs(urlparse(self.path).query)
        try:
            with self.storage.lock:
                self.storage.wanted = query.get("ifGenerationMatch", [None])[0]
                emulator.Router(self).handle(method)
        except PreconditionError:
            self._refuse(412, "conditionNotMet")
        finally:
            answer = self.wfile.getvalue()  # type: ignore[attr-defined]
            self.rfile, self.wfile = incoming, outgoing
        is_list = method == "GET" and "maxResults" in query
        self.wfile.write(_page_of(answer, query) if is_list else answer)

    def _refuse(self, status: int, reason: str) -> None:
        error = {"code": status, "message": reason, "errors": [{"reason": reason}]}
        body = json.dumps({"error": error}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = functools.partialmethod(_go, "GET")  # noqa: N815
    do_POST = functools.partialmethod(_go, "POST")  # noqa: N815
    do_PUT = functools.partialmethod(_go, "PUT")  # noqa: N815
    do_DELETE = functools.partialmethod(_go, "DELETE")  # noqa: N815
    do_PATCH = functools.partialmethod(_go, "PATCH")  # noqa: N815


class GcsServer:
    """A running server. `plan` holds its faults."""

    def __init__(self, server: http.server.ThreadingHTTPServer, objects: Objects, plan: Plan):
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.plan = plan
        self._objects = objects

    def create_bucket(self, name: str) -> None:
        with self._objects.lock:
            self._objects.create_bucket(name, {"name": name, "id": name, "kind": "storage#bucket"})

    def keys(self, bucket: str) -> list[str]:
        with self._objects.lock:
            return sorted(self._objects.objects.get(bucket, {}))

    def content(self, bucket: str, key: str) -> bytes:
        with self._objects.lock:
            content: bytes = self._objects.get_file(bucket, key)
            return content

    def replace(self, bucket: str, key: str, content: bytes) -> None:
        """Create or change an object without preconditions, with correct checksums."""
        with self._objects.lock:
            kind, size = "application/octet-stream", str(len(content))
            obj = _make_object_resource(self.url, bucket, key, kind, size)
            self._objects.wanted = None
            self._objects.create_file(bucket, key, content, _checksums(content, obj))

    def remove(self, bucket: str, key: str) -> None:
        with self._objects.lock:
            self._objects.wanted = None
            self._objects.delete_file(bucket, key)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """Do not report clients that closed their connection."""


@contextmanager
def gcs_server(port: int = 0) -> Iterator[GcsServer]:
    """Run a server on loopback, in threads of this process."""
    logging.getLogger("api.object").setLevel(logging.CRITICAL)
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    emulator._read_data = _read_fast
    objects, plan = Objects(), Plan()
    handler = functools.partial(type("Handler", (_Handler,), {"plan": plan}), objects)
    server = _Server(("127.0.0.1", port), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield GcsServer(server, objects, plan)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
