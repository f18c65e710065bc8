"""The deadlines of a job: to be scheduled, to start, to make progress, and to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from components.tfjob import state
from components.tfjob.names import Tree
from trainer.config.kubernetes import DeadlinesConfig


class Deadlines:
    """The stage of a job as a whole, and how long it may last.

    A job that has run once stays in the stage `running`: when a worker is lost and its replacement
    waits for a node, training continues, and if it does not, it stalls.
    """

    def __init__(
        self,
        config: DeadlinesConfig,
        expected_pods: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin in the stage `queueing`.

        Args:
            config: in seconds, 0 for none.
            expected_pods: number of pods of the job.
            clock: monotonic seconds.
        """
        self._config = config
        self._expected_pods = expected_pods
        self._clock = clock
        self._stage = state.QUEUEING
        self._entered_at = self._progressed_at = clock()

    def observe(self, pods: Iterable[Tree]) -> None:
        """Update the stage from the current pods."""
        if self._stage == state.RUNNING:
            return
        stages = [state.stage(pod) for pod in pods]
        if len(stages) < self._expected_pods or state.QUEUEING in stages:
            self._enter(state.QUEUEING)
        else:
            self._enter(state.STARTING if state.STARTING in stages else state.RUNNING)

    def progressed(self) -> None:
        """Restart the deadline for progress: the global step has changed."""
        self._progressed_at = self._clock()

    def seconds_left(self) -> float:
        """Return the seconds to the next deadline; infinite where there is none."""
        return min(self._ends().values(), default=math.inf) - self._clock()

    def exceeded(self, pods: Iterable[Tree]) -> str:
        """Return one line about the deadline that was exceeded, or an empty string."""
        late = [key for key, end in self._ends().items() if end <= self._clock()]
        if not late:
            return ""
        seconds = getattr(self._config, late[0])
        limit = f"{seconds:g} s (cluster.kubernetes.deadlines.{late[0]})"
        if late[0] == "stalling":
            return f"training has made no progress for {limit}"
        if late[0] == "running":
            return f"training was not done after {limit}"
        waiting = [pod for pod in pods if state.stage(pod) == late[0]]
        tasks = ", ".join(sorted(str(state.task_of(pod)) for pod in waiting)) or "the job"
        what = "has no node" if late[0] == "queueing" else "has not started"
        reason = next(filter(None, map(state.waiting_reason, waiting)), "")
        return ": ".join(filter(None, [f"{tasks} {what} after {limit}", " ".join(reason.split())]))

    def _enter(self, stage: str) -> None:
        if stage != self._stage:
            self._stage = stage
            self._entered_at = self._progressed_at = self._clock()

    def _ends(self) -> dict[str, float]:
        since = {self._stage: self._entered_at}
        if self._stage == state.RUNNING:
            since["stalling"] = self._progressed_at
        limits = {key: getattr(self._config, key) for key in since}
        return {key: since[key] + limit for key, limit in limits.items() if limit}
