"""The server of the metrics, on one port of the leading task.

It answers on loopback only, unless `FLOTILLA_METRICS_HOST` says otherwise, as it does in the pods
of a job. Nothing that happens to it ends training: a port that is taken is one warning.
"""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from trainer import events, storage
from trainer.checkpoints.index import KIND
from trainer.cluster.launcher import Job
from trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from trainer.errors import UserError
from trainer.monitoring.metrics import RunMetrics
from trainer.monitoring.task_watch import TaskWatch
from trainer.topology import Cluster, Task

LOOPBACK = "127.0.0.1"
# A client that sends nothing, or reads nothing, is left after so many seconds.
CLIENT_SECONDS = 5.0
# More clients at once are refused: each takes the interpreter for a moment.
MOST_CLIENTS = 4
log = logging.getLogger(__name__)


@contextmanager
def exported(job: Job, cluster: Cluster, task: Task) -> Iterator[None]:
    """Serve the metrics of a run in this block, where `cluster.metrics_port` is set."""
    port = job.config.cluster.metrics_port
    if not port:
        yield
        return
    metrics = RunMetrics(job.config, job.run_id)
    watch = TaskWatch(cluster, task, job.workdir, metrics.tasks)
    threading.Thread(
        target=_read_newest, args=(job, metrics), name="metrics-checkpoint", daemon=True
    ).start()
    server = served(metrics.registry, port)
    try:
        with events.heard_by(metrics.take), watch.watching():
            yield
    finally:
        if server:
            # Training does not wait for a client that is being answered.
            server.shutdown()
            server.server_close()


def served(registry: CollectorRegistry, port: int) -> WSGIServer | None:
    """Serve a registry on threads of this process; None, with a warning, where it cannot be.

    Port 0 is any that is free.
    """
    host = os.environ.get(METRICS_HOST, "") or LOOPBACK
    try:
        server = _server(host, port, make_wsgi_app(registry))
    except OSError as error:
        reason = f"cluster.metrics_port: {port} on {host}: {error.strerror or error}"
        log.warning("no metrics for Prometheus: %s", reason)
        events.emit(events.MetricsUnserved(reason=reason))
        return None
    thread = threading.Thread(
        target=server.serve_forever, args=(0.1,), name="metrics-server", daemon=True
    )
    thread.start()
    return server


def _server(host: str, port: int, app: Any) -> WSGIServer:
    kind = _server_of(socket.AF_INET)
    if host == EVERY_HOST:
        # An address of each family, where the system has both.
        with suppress(OSError):
            return make_server("::", port, app, _server_of(socket.AF_INET6), _Handler)
        host = ""
    elif ":" in host:
        kind = _server_of(socket.AF_INET6)
    return make_server(host, port, app, kind, _Handler)


def _server_of(family: socket.AddressFamily) -> type[WSGIServer]:
    class Server(_Server):
        address_family = family

    return Server


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape is no news."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # `server_close` would wait for the clients.
    block_on_close = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*arguments, **settings)

    def server_bind(self) -> None:
        """Bind, without the name of this host, for which the base asks a name server."""
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log no traceback of a client that has left."""
        log.debug("a client of the metrics has left", exc_info=True)


def _read_newest(job: Job, metrics: RunMetrics) -> None:
    """Set the checkpoint that a resumed run begins with; of a new run there is none."""
    try:
        found = [
            (int(manifest.fields["global_step"]), manifest.created)
            for _, manifest in storage.published(job.checkpoints, KIND)
        ]
        if found:
            step, created = max(found)
            metrics.checkpoint_at(step, datetime.fromisoformat(created).timestamp())
    except (UserError, KeyError, ValueError, TypeError) as error:
        # The next one that is published is known in any case.
        log.warning("the age of the newest checkpoint is not known: %s", error)
