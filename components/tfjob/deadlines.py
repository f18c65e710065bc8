"""How long a job may queue, start, run and stand still, each with a message of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from components.tfjob import state
from components.tfjob.client import Tree
from trainer.config.kubernetes import DeadlinesConfig


class Stages:
    """The stage of a whole job, and since when.

    A job that has run once is running: when a worker is lost and its successor queues, training
    goes on, and where it does not, it stalls.
    """

    def __init__(
        self,
        deadlines: DeadlinesConfig,
        expected: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to queue.

        Args:
            deadlines: in seconds, 0 for none.
            expected: number of pods.
            clock: seconds that only grow.
        """
        self._deadlines = deadlines
        self._expected = expected
        self._clock = clock
        self._stage = state.QUEUEING
        self._since = self._moved_at = clock()

    def look(self, pods: Iterable[Tree]) -> str:
        """Take the pods as they are, and return the stage."""
        if self._stage != state.RUNNING:
            stages = [state.stage(pod) for pod in pods]
            if len(stages) < self._expected or state.QUEUEING in stages:
                self._enter(state.QUEUEING)
            else:
                self._enter(state.STARTING if state.STARTING in stages else state.RUNNING)
        return self._stage

    def moved(self) -> None:
        """Training has come further."""
        self._moved_at = self._clock()

    def seconds_left(self) -> float:
        """Return the seconds to the next deadline; infinite where there is none."""
        return min(self._ends().values(), default=math.inf) - self._clock()

    def overdue(self, pods: Iterable[Tree]) -> str:
        """Return what took too long, in one line, or nothing."""
        late = [key for key, end in self._ends().items() if end <= self._clock()]
        if not late:
            return ""
        seconds = getattr(self._deadlines, late[0])
        said = f"{seconds:g} s (cluster.kubernetes.deadlines.{late[0]})"
        if late[0] == "stalling":
            return f"training has made no progress for {said}"
        if late[0] == "running":
            return f"training was not done after {said}"
        what = "has no node" if late[0] == "queueing" else "has not started"
        return f"{_waiting(pods, late[0])} {what} after {said}{_hindrance(pods, late[0])}"

    def _enter(self, stage: str) -> None:
        if stage != self._stage:
            self._stage = stage
            self._since = self._moved_at = self._clock()

    def _ends(self) -> dict[str, float]:
        since = {self._stage: self._since}
        if self._stage == state.RUNNING:
            since["stalling"] = self._moved_at
        limits = {key: getattr(self._deadlines, key) for key in since}
        return {key: since[key] + limit for key, limit in limits.items() if limit}


def _waiting(pods: Iterable[Tree], stage: str) -> str:
    tasks = [str(state.task_of(pod)) for pod in pods if state.stage(pod) == stage]
    return ", ".join(sorted(tasks)) or "the job"


def _hindrance(pods: Iterable[Tree], stage: str) -> str:
    for pod in pods:
        if state.stage(pod) == stage and state.hindrance(pod):
            return f": {' '.join(state.hindrance(pod).split())}"
    return ""
