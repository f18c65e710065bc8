"""The server of the metrics, on one port of the leading task; its failure is one warning."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from trainer import events, storage
from trainer.checkpoints.index import KIND
from trainer.cluster.launcher import Job
from trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from trainer.errors import UserError
from trainer.monitoring.metrics import RunMetrics
from trainer.monitoring.task_watch import TaskWatch
from trainer.topology import Cluster, Task

LOOPBACK = "127.0.0.1"
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
    """Serve a registry on threads; None, with a warning, where it cannot be. Port 0: any."""
    host = os.environ.get(METRICS_HOST, "") or LOOPBACK
    # One socket for the addresses of both families, where the system has both.
    tried = ("::", "0.0.0.0") if host == EVERY_HOST else (host,)
    try:
        with suppress(OSError) if len(tried) > 1 else nullcontext():
            return start_http_server(port, tried[0], registry)[0]
        return start_http_server(port, tried[-1], registry)[0]
    except OSError as error:
        reason = f"cluster.metrics_port: {port} on {host}: {error.strerror or error}"
        log.warning("no metrics for Prometheus: %s", reason)
        events.emit(events.MetricsUnserved(reason=reason))
        return None


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
