"""The metrics of a run, from the events of the leading task.

Names, units and types are Prometheus's conventions (https://prometheus.io/docs/practices/naming):
base units, `_total` for what only grows, and a time as its timestamp next to its age.

Each event sets a few numbers in this process: microseconds, on the thread that emits it. A scrape
reads the numbers on a thread of its own, and no step waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, Summary

from trainer import events
from trainer.config.schema import Config

log = logging.getLogger(__name__)


class RunMetrics:
    """The metrics of one attempt, in a registry of their own.

    Attributes:
        registry: what is served.
    """

    def __init__(self, config: Config, run_id: str) -> None:
        """Begin without values: a metric is served from its first one on."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._warned = False
        self._published_at = 0.0
        self._make_training()
        self._make_checkpoints()
        self._make_tasks()
        about = {
            "run_id": run_id,
            "model": config.name,
            "strategy": config.training.strategy,
            "config_hash": config.digest(),
        }
        run = Gauge("flotilla_run_info", "The run; 1", list(about), registry=self.registry)
        run.labels(**about).set(1)
        self._target.set(config.training.steps)

    def _make_training(self) -> None:
        self._step = self._late("flotilla_global_step", "Updates applied")
        self._target = self._late("flotilla_global_step_target", "Updates at which training ends")
        self._speed = self._late("flotilla_steps_per_second", "Updates of the last second or so")
        self._loss = self._late("flotilla_loss", "Mean loss of training over the last updates")
        self._rate = self._late("flotilla_learning_rate", "Learning rate of the next update")
        self._left = self._late("flotilla_remaining_seconds", "Time left at this speed")
        self._seconds = self._late(
            "flotilla_training_seconds", "Time in training steps so far, over all attempts"
        )
        self._progress = self._late(
            "flotilla_progress_timestamp_seconds", "When the last update was seen"
        )
        self._examples = self._late(
            "flotilla_attempt_examples", "Examples that the workers took in this attempt"
        )
        self._further = self._late(
            "flotilla_strategy_metric", "Further metrics of the strategy by name", "metric"
        )
        self._validation = self._late(
            "flotilla_validation_metric", "The last validation, by metric", "metric"
        )
        self._validated = self._late(
            "flotilla_validation_global_step", "Global step of the last validation"
        )

    def _make_checkpoints(self) -> None:
        self._published = Counter(
            "flotilla_checkpoints_published", "Checkpoints published", registry=self.registry
        )
        self._failures = Counter(
            "flotilla_checkpoint_upload_failures", "Failed uploads", registry=self.registry
        )
        self._pause = Summary(
            "flotilla_checkpoint_pause_seconds",
            "How long training waited for checkpoints",
            registry=self.registry,
        )
        self._checkpoint = self._late(
            "flotilla_checkpoint_global_step", "Global step of the newest published checkpoint"
        )
        self._checkpoint_time = self._late(
            "flotilla_checkpoint_timestamp_seconds", "When the newest checkpoint was published"
        )
        self._checkpoint_age = self._late(
            "flotilla_checkpoint_age_seconds", "Time since the newest checkpoint was published"
        )

    def _make_tasks(self) -> None:
        self._alive = self._late(
            "flotilla_tasks_alive", "Tasks that answer, this one included, by role", "role"
        )
        self._expected = self._late("flotilla_tasks_expected", "Tasks of the cluster", "role")
        self._restarts = Counter(
            "flotilla_restarts", "Tasks that began again", ["role"], registry=self.registry
        )
        self._restarted: dict[str, int] = {}

    def _late(self, name: str, documentation: str, *labels: str) -> _LateGauge:
        return _LateGauge(self.registry, name, documentation, labels)

    def take(self, event: events.Event) -> None:
        """Set what an event says; nothing that is wrong here ends a run."""
        try:
            self._take(event)
        except Exception as error:
            if not self._warned:
                log.warning("a metric of the run is not served: %s", error)
            self._warned = True

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.AttemptBegin):
            self._step.set(event.global_step)
            # From here on no progress is a standstill.
            self._progress.set(event.time)
        elif isinstance(event, events.Progress):
            self._take_progress(event)
        elif isinstance(event, events.Validation):
            self._validated.set(event.global_step)
            for name, value in event.metrics.items():
                self._validation.set(value, name)
        elif isinstance(event, events.CheckpointPublished):
            self._published.inc()
            self.checkpoint_at(event.global_step, event.time)
        elif isinstance(event, events.Saved):
            self._pause.observe(event.seconds)
        elif isinstance(event, events.UploadFailed):
            self._failures.inc()

    def _take_progress(self, event: events.Progress) -> None:
        self._step.set(event.global_step)
        self._loss.set(event.loss)
        self._speed.set(event.steps_per_second)
        self._rate.set(event.learning_rate)
        self._left.set(event.seconds_left)
        self._seconds.set(event.seconds)
        self._progress.set(event.time)
        for name, value in event.metrics.items():
            if name == "workers":
                self._examples.set(_examples(value))
            elif isinstance(value, int | float):
                self._further.set(value, name)

    def checkpoint_at(self, step: int, published: float) -> None:
        """Set the newest checkpoint, and when it was published in seconds since 1970."""
        if published < self._published_at:
            return
        self._published_at = published
        self._checkpoint.set(step)
        self._checkpoint_time.set(published)
        self._checkpoint_age.read(lambda: max(0.0, time.time() - published))

    def tasks(
        self, alive: Mapping[str, int], expected: Mapping[str, int], restarts: Mapping[str, int]
    ) -> None:
        """Set how many tasks of each role there are, and how often one has begun again."""
        for role, count in expected.items():
            self._expected.set(count, role)
            self._alive.set(alive.get(role, 0), role)
            before = self._restarted.get(role, 0)
            self._restarted[role] = max(before, restarts.get(role, 0))
            self._restarts.labels(role).inc(self._restarted[role] - before)


class _LateGauge:
    """A gauge that is registered with its first value: a 0 would be taken for one."""

    def __init__(
        self, registry: CollectorRegistry, name: str, documentation: str, labels: tuple[str, ...]
    ) -> None:
        self._registry = registry
        # Outside of every registry until it has a value.
        self._gauge = Gauge(name, documentation, labels, registry=None)
        self._is_served = False

    def set(self, value: float, *labels: str) -> None:
        gauge = self._gauge.labels(*labels) if labels else self._gauge
        gauge.set(float(value))
        self._serve()

    def read(self, value: Any) -> None:
        """Call `value` at each scrape."""
        self._gauge.set_function(value)
        self._serve()

    def _serve(self) -> None:
        if not self._is_served:
            self._registry.register(self._gauge)
            self._is_served = True


def _examples(workers: Mapping[str, Mapping[str, Any]]) -> int:
    return sum(int(each["examples"]) for each in workers.values())
