"""The Prometheus metrics of a run, which the leading task computes from the run's state.

Names, units and types follow Prometheus's conventions
(https://prometheus.io/docs/practices/naming). A separate thread serves requests, so that no
training step waits for them. A metric without a value is not served.

The leading task also probes the port of each other task every two seconds, or less often if there
are more than 64. Loading TensorFlow takes seconds, so hardly any restart is missed. Restarts of the
leading task, and of forked tasks in a local run, are counted in files in the tasks' folders.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import KIND
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.liveness import ANSWER_SECONDS, Peers, probe_peers
from flotilla.trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from flotilla.trainer.cluster.process import STARTS
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.events import (
    CheckpointPublished,
    Event,
    Progress,
    Saved,
    UploadFailed,
    Validation,
)
from flotilla.trainer.events.run_state import RunState
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import is_number
from flotilla.trainer.storage.local import start_time

Counts = Mapping[str, int]
LOOPBACK = "127.0.0.1"
FILE = "restarts.json"
# The pause between two rounds of probes, in seconds (longer if there are many tasks), and the
# maximum number of tasks to probe per second.
PAUSE_SECONDS, TASKS_PER_SECOND = 2.0, 32
# Timeout of the last probe, in seconds. This probe shows which task has ended the attempt.
LAST_SECONDS = 1.0
log = logging.getLogger(__name__)
_GAUGES = {
    "global_step": "Updates applied",
    "global_step_target": "Global step at which training ends",
    "steps_per_second": "Updates per second, over about the last second",
    "loss": "Mean training loss over the last updates",
    "learning_rate": "Learning rate of the next update",
    "remaining_seconds": "Estimated time left at the current speed",
    "training_seconds": "Time spent in training steps so far, over all attempts",
    "epoch": "Passes over the training examples so far",
    "progress_timestamp_seconds": "Time of the last update",
    "attempt_examples": "Examples that the workers read in this attempt",
    "strategy_metric": "Additional metrics of the strategy by name",
    "validation_metric": "Metrics of the last validation",
    "validation_global_step": "Global step of the last validation",
    "checkpoint_global_step": "Global step of the newest published checkpoint",
    "checkpoint_timestamp_seconds": "Time at which the newest checkpoint was published",
    "checkpoint_age_seconds": "Time since the newest checkpoint was published",
    "tasks_alive": "Tasks that respond, including this one, by role",
    "tasks_expected": "Tasks of the cluster",
}


_OF_PROGRESS = ("loss", "steps_per_second", "learning_rate", "epoch")
# Metrics that a user's program may leave out. 0 or -1 means that it does not report them.
_SAID = ("global_step_target", "loss", "remaining_seconds", "learning_rate", "epoch")


class RunMetrics(Collector):
    """The metrics of one attempt, which `registry` serves."""

    def __init__(self, config: Config, run_id: str) -> None:
        """Create the metrics without values."""
        self._about = {
            "run_id": run_id,
            "model": config.name,
            "strategy": "program" if config.program.command else config.training.strategy,
            "config_hash": config.digest(),
        }
        # A user's program itself reports the step at which training ends.
        self._is_program = bool(config.program.command)
        self._target = 0 if self._is_program else config.training.steps
        self._state = RunState()
        self._pause = 0.0
        self._checkpoint: tuple[float, int] | None = None
        self._alive: Counts = {}
        self._expected: Counts = {}
        self._restarts: dict[str, int] = {}
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def take(self, event: Event) -> None:
        """Process an event of the run."""
        self._state.take(event)
        if isinstance(event, Saved):
            self._pause += event.seconds
        elif isinstance(event, CheckpointPublished):
            self.set_checkpoint(event.global_step, event.time)

    def set_checkpoint(self, step: int, published: float) -> None:
        """Set the step of the newest checkpoint, and its Unix time of publication."""
        self._checkpoint = max(self._checkpoint or (0.0, 0), (published, step))

    def tasks(self, alive: Counts, expected: Counts, restarts: Counts) -> None:
        """Set the numbers of running tasks, expected tasks and restarts, by role."""
        self._alive, self._expected = dict(alive), dict(expected)
        self._restarts = {
            role: max(self._restarts.get(role, 0), restarts.get(role, 0)) for role in expected
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics. The registry calls this at each scrape."""
        run = GaugeMetricFamily(
            "flotilla_run_info",
            "Information about the run; the value is always 1",
            labels=list(self._about),
        )
        run.add_metric(list(self._about.values()), 1)
        yield run
        counts = self._state.counts
        for name, words, kind in (
            ("checkpoints_published", "Checkpoints published", CheckpointPublished),
            ("checkpoint_upload_failures", "Failed uploads", UploadFailed),
        ):
            yield CounterMetricFamily(f"flotilla_{name}", words, counts[kind])
        yield SummaryMetricFamily(
            "flotilla_checkpoint_pause_seconds",
            "Time for which training waited for checkpoints",
            count_value=counts[Saved],
            sum_value=self._pause,
        )
        by_role = CounterMetricFamily("flotilla_restarts", "Restarted tasks", labels=["role"])
        for role, count in self._restarts.items():
            by_role.add_metric([role], count)
        yield by_role
        for name, value in {**self._collect_training(), **self._collect_checkpoint()}.items():
            if is_number(value):
                yield GaugeMetricFamily(f"flotilla_{name}", _GAUGES[name], value)
        for name, label, values in self._collect_labelled():
            family = GaugeMetricFamily(f"flotilla_{name}", _GAUGES[name], labels=[label])
            for key, value in values.items():
                if is_number(value):
                    family.add_metric([key], value)
            if family.samples:
                yield family

    def _collect_training(self) -> dict[str, Any]:
        state = self._state
        values: dict[str, float] = {"global_step_target": self._target}
        if state.moved:
            # Report these metrics from the start of an attempt, so that a lack of progress counts
            # as a stall.
            values |= {"global_step": state.global_step, "progress_timestamp_seconds": state.moved}
        if progress := state.newest(Progress):
            workers = progress.metrics.get("workers") or {}
            values |= {name: getattr(progress, name) for name in _OF_PROGRESS}
            values |= {
                "remaining_seconds": progress.seconds_left, "training_seconds": progress.seconds,
            }  # fmt: skip
            if self._is_program:
                values["global_step_target"] = progress.steps
            if workers:
                values["attempt_examples"] = sum(each["examples"] for each in workers.values())
        if validation := state.newest(Validation):
            values["validation_global_step"] = validation.global_step
        unknown = (
            {name for name in _SAID if values.get(name, 0) in (0, -1)} if self._is_program else ()
        )
        return {name: value for name, value in values.items() if name not in unknown}

    def _collect_checkpoint(self) -> dict[str, Any]:
        if not self._checkpoint:
            return {}
        published, step = self._checkpoint
        return {
            "checkpoint_global_step": step,
            "checkpoint_timestamp_seconds": published,
            "checkpoint_age_seconds": max(0.0, time.time() - published),
        }

    def _collect_labelled(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        if progress := self._state.newest(Progress):
            yield "strategy_metric", "metric", progress.metrics
        if validation := self._state.newest(Validation):
            yield "validation_metric", "metric", validation.metrics
        alive = {role: self._alive.get(role, 0) for role in self._expected}
        yield "tasks_alive", "role", alive
        yield "tasks_expected", "role", self._expected


class TaskWatch:
    """Counts the responding tasks and the restarts of each role."""

    def __init__(
        self,
        cluster: Cluster,
        this: Task,
        folder: Path,
        report: Callable[[Counts, Counts, Counts], None],
    ) -> None:
        """Watch from `this`. `report` gets the numbers of running tasks, all tasks and restarts."""
        self._cluster, self._this, self._report = cluster, this, report
        # Make the path absolute, because this process changes its working directory later.
        self._file = folder.absolute() / FILE
        self._tasks = [
            Task(role=role, index=index)
            for role, hosts in cluster.addresses.items()
            for index in range(len(hosts))
        ]
        self._expected = Counter(task.role for task in self._tasks)
        self._restarts: Counter[str] = Counter()
        # The restarts that the launcher has counted, if known.
        self._started_again: Counter[str] | None = None
        # The tasks that have ever responded, and those of them that have ended since then.
        self._seen, self._lost = set[str](), set[str]()
        self._over = threading.Event()
        self._once = threading.Lock()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch during this block, and probe once more if an error ends it."""
        self._add_earlier_counts()
        self._report({self._this.role: 1}, self._expected, self._count_restarts())
        threading.Thread(target=self._watch, name="metrics-tasks", daemon=True).start()
        try:
            yield
        except BaseException:
            self._over.set()
            with suppress(Exception):
                self.look(LAST_SECONDS)
            raise
        finally:
            self._over.set()

    def look(self, timeout: float = ANSWER_SECONDS) -> None:
        """Probe all tasks once, and report the result."""
        with self._once:
            self.note(probe_peers(self._cluster, self._this, timeout))

    def note(self, peers: Peers) -> None:
        """Process the result of one round of probes."""
        gone = {str(task) for task in peers.gone}
        silent = {str(task) for task in peers.silent}
        alive = [task for task in self._tasks if str(task) not in gone | silent]
        before = (set(self._seen), set(self._lost))
        for task in alive:
            if str(task) in self._lost:
                self._restarts[task.role] += 1
        here = {str(task) for task in alive}
        self._seen |= here
        # A silent task may only be slow, so it does not become lost.
        self._lost = (self._seen & gone) | (self._lost & silent)
        if (self._seen, self._lost) != before:
            self._keep()
        self._report(Counter(task.role for task in alive), self._expected, self._count_restarts())

    def _count_restarts(self) -> Counter[str]:
        self._started_again = self._read_launcher() or self._started_again
        return self._started_again or self._restarts

    def _read_launcher(self) -> Counter[str] | None:
        found = Counter[str]()
        try:
            for task in self._tasks:
                at = self._file.parents[1] / str(task) / STARTS
                found[task.role] += int(at.read_text(encoding="ascii")) - 1
        except (OSError, ValueError):
            return None
        return found

    def _watch(self) -> None:
        pause = max(PAUSE_SECONDS, len(self._tasks) / TASKS_PER_SECOND)
        while not self._over.is_set():
            try:
                self.look()
            except Exception as error:
                log.warning("can no longer count the tasks of the cluster: %s", error)
                return
            self._over.wait(pause)

    def _add_earlier_counts(self) -> None:
        """Add the counts of earlier attempts of this task under the same launcher."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if kept["launcher"] == _launcher():
                self._restarts.update({str(k): int(n) for k, n in kept["restarts"].items()})
                self._seen, self._lost = set(kept["seen"]), set(kept["lost"])
                self._restarts[self._this.role] += 1
        self._keep()

    def _keep(self) -> None:
        kept = {
            "launcher": _launcher(),
            "restarts": dict(self._restarts),
            "seen": sorted(self._seen),
            "lost": sorted(self._lost),
        }
        # If the disk is full, the next attempt starts counting at zero.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps(kept), encoding="utf-8")


def _launcher() -> str:
    """Return the PID and the start time of the parent process."""
    parent = os.getppid()
    return f"{parent} {start_time(parent)}"


@contextmanager
def export_metrics(job: Job, cluster: Cluster, task: Task) -> Iterator[None]:
    """Serve the metrics of a run in this block, if `cluster.metrics_port` is set."""
    port = job.config.cluster.metrics_port
    if not port:
        yield
        return
    metrics = RunMetrics(job.config, job.run_id)
    # The tasks of a user's program may not respond at their ports, so watch only this task.
    own = {task.role: cluster.addresses[task.role][:1]} if job.config.program.command else None
    watched = Cluster(addresses=own) if own else cluster
    watch = TaskWatch(watched, task, job.workdir, metrics.tasks)
    threading.Thread(
        target=_read_newest, args=(job, metrics), name="metrics-checkpoint", daemon=True
    ).start()
    server = serve_registry(metrics.registry, port)
    try:
        with events.listen(metrics.take), watch.watching():
            yield
    finally:
        if server:
            # These calls do not wait for a client whose request is being served.
            server.shutdown()
            server.server_close()


def serve_registry(registry: CollectorRegistry, port: int) -> WSGIServer | None:
    """Serve a registry over HTTP in threads. Port 0 means any free port.

    If the port cannot be opened, log a warning and return None.
    """
    host = os.environ.get(METRICS_HOST, "") or LOOPBACK
    # One socket serves IPv4 and IPv6 if the system supports both.
    tried = ("::", "0.0.0.0") if host == EVERY_HOST else (host,)
    try:
        with suppress(OSError) if len(tried) > 1 else nullcontext():
            return start_http_server(port, tried[0], registry)[0]
        return start_http_server(port, tried[-1], registry)[0]
    except OSError as error:
        reason = f"cannot serve on {host}:{port} (cluster.metrics_port): {error.strerror or error}"
        log.warning("no metrics for Prometheus: %s", reason)
        events.emit(events.MetricsUnserved(reason=reason))
        return None


def _read_newest(job: Job, metrics: RunMetrics) -> None:
    """Set the metrics of the checkpoint from which a resumed run starts. A new run has none."""
    try:
        found = [
            (int(manifest.fields["global_step"]), manifest.created_at)
            for _, manifest in storage.list_published(job.checkpoints, KIND)
        ]
        if found:
            step, created = max(found)
            metrics.set_checkpoint(step, created.timestamp())
    except (UserError, KeyError, ValueError, TypeError) as error:
        # Only log the error, because the next published checkpoint sets this value anyway.
        log.warning("cannot find the age of the newest checkpoint: %s", error)
