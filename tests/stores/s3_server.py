"""An S3 server: moto's, with faults, latency, and direct access to its objects."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import S3Backend, s3_backends
from werkzeug.serving import BaseWSGIServer, make_server

from tests.stores.faults import Faulty, Plan


class _Handler(Faulty, MotoRequestHandler):
    def log(self, *_: Any, **__: Any) -> None:
        """Write no log."""


class S3Server:
    """A running server. `plan` holds its faults. All servers of a process share their objects."""

    def __init__(self, server: BaseWSGIServer, plan: Plan) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        self.plan = plan

    @property
    def _backend(self) -> S3Backend:
        backend: S3Backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        return backend

    def create_bucket(self, name: str) -> None:
        self._backend.create_bucket(name, "us-east-1")

    def keys(self, bucket: str) -> list[str]:
        return sorted(self._backend.get_bucket(bucket).keys.keys())

    def content(self, bucket: str, key: str) -> bytes:
        found = self._backend.get_object(bucket, key)
        assert found is not None
        content: bytes = found.value
        return content

    def replace(self, bucket: str, key: str, content: bytes) -> None:
        """Create or change an object without preconditions, with a correct ETag."""
        self._backend.put_object(bucket, key, content)

    def remove(self, bucket: str, key: str) -> None:
        self._backend.delete_object(bucket, key)


@contextmanager
def s3_server(port: int = 0) -> Iterator[S3Server]:
    """Run a server on loopback, in threads of this process."""
    plan = Plan()
    handler = type("Handler", (_Handler,), {"plan": plan})
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", port, application, threaded=True, request_handler=handler)
    server.daemon_threads = True  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield S3Server(server, plan)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
