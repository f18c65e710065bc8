"""Counts the restarts of a run's tasks, and describes the failure of a task."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from flotilla.components.kubernetes.client import Api
from flotilla.components.kubernetes.deadlines import last_events
from flotilla.components.kubernetes.engine import Engine
from flotilla.components.kubernetes.pods.pod_state import Loss, TaskEnd
from flotilla.trainer import events
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Task
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, FAILED, TRY_AGAIN, USAGE, UserError


def describe_failure(
    api: Api, end: TaskEnd, log_tail: Iterable[str], *, is_program: bool = False
) -> str:
    """Return a failed task's report: its message if that explains the exit, or else the cause."""
    if (end.code in (FAILED, TRY_AGAIN, USAGE) or is_program) and end.message:
        return f"{end.message} ({end.task}, pod {end.pod})"
    report = f"{end.task} ended with {end.cause} (pod {end.pod}){last_events(api, end.uid)}"
    lines = " | ".join(log_tail) or end.message
    return f"{report}; last log lines: {lines}" if lines and end.code is not None else report


class Restarts:
    """Counts the restarts of all tasks of a run. Kubernetes counts only restarts within a pod.

    A lost pod counts toward `cluster.max_restarts` only until training has published a newer
    checkpoint, because training itself does not cause the loss.
    """

    def __init__(self, config: Config, engine: Engine) -> None:
        """Start at 0 restarts. The limit is `cluster.max_restarts`."""
        self.limit = config.cluster.max_restarts
        self._config, self._engine = config, engine
        # The lock is needed because the thread that reads the leader's log calls `record_progress`.
        self._lock = threading.Lock()
        self._count = self._drawn = 0
        self._newest = -1
        # Number of pods that each task has lost since the newest checkpoint.
        self._losses: Counter[Task] = Counter()
        # Pods whose end was already counted. Do not count them again if their deletion is reported.
        self._counted: set[str] = set()
        # For each task: the run's total number of restarts when the task last started.
        self._count_at_start: dict[Task, int] = {}

    def is_final(self, end: TaskEnd) -> bool:
        """Return whether this exit of a task fails the job instead of restarting the task."""
        return self._engine.is_final(self._config, end)

    def record_progress(self, step: int) -> None:
        """Record a published checkpoint. If it is the newest, reset the count of lost pods."""
        with self._lock:
            if step > self._newest:
                self._newest = step
                self._drawn -= self._losses.total()
                self._losses.clear()

    def count(self, end: TaskEnd, cause: str = "") -> bool:
        """Count a restart unless the exit is final. Return False if the limit is exceeded."""
        if self.is_final(end):
            return True
        lost = end.task if end.pod_deleted or end.code is None else None
        self._counted.add(end.uid)
        return self._count_task(end.task, end.code, cause or end.cause, lost)

    def count_in_pod(self, restart: events.Restart) -> bool:
        """Count a task's restart by its guard. Return False if the limit is exceeded."""
        role, _, index = restart.task.rpartition("-")
        return self._count_task(Task(role=role, index=int(index)), restart.code, restart.cause)

    def _count_task(
        self, task: Task, code: int | None, cause: str, lost: Task | None = None
    ) -> bool:
        # Do not count a restart that follows the loss of another task: both are one incident.
        same = code == BEGIN_AGAIN and self._count_at_start.get(task, 0) < self._count
        # The evaluator's restarts are not limited, because training does not depend on it.
        if not same and task.role != "evaluator" and not self._draw(lost):
            return False
        self._count_at_start[task] = self._count
        self._emit(task, cause)
        return True

    def count_loss(self, loss: Loss) -> None:
        """Count a lost pod that failed the job. Raises `UserError` if the limit is exceeded."""
        if loss.uid in self._counted:
            return
        if not self._draw(loss.task):
            losses = self._losses + Counter([loss.task])
            each = ", ".join(
                f"{count} of {task}" for task, count in sorted(losses.items(), key=str)
            )
            raise UserError(
                f"cluster.max_restarts ({self.limit}) is exceeded: {loss.task} lost its pod "
                f"{loss.pod}: {loss.how}; pods lost since the newest checkpoint: {each}"
            )
        self._emit(loss.task, loss.cause)

    def _draw(self, lost: Task | None) -> bool:
        with self._lock:
            if self._drawn >= self.limit:
                return False
            self._drawn += 1
            self._count += 1
            if lost:
                self._losses[lost] += 1
            return True

    def _emit(self, task: Task, cause: str) -> None:
        events.emit(events.Restart(task=str(task), cause=cause, restarts=self._count))
