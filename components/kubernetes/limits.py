"""The limits of a run: deadlines of its job, restarts of its tasks, and pods that are refused.

The deadlines apply to the acceptance, scheduling, start, progress and end of a job. Unlike the
conditions of the job, events tell why a pod cannot be created. The permission to list events is
optional.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus

from flotilla.components.kubernetes.client import (
    Api,
    RefusedError,
    UnreachableError,
    silent_controller,
)
from flotilla.components.kubernetes.engine import Engine
from flotilla.components.kubernetes.names import EVENTS, JobKind, Tree
from flotilla.components.kubernetes.pods import pod_state
from flotilla.components.kubernetes.pods.pod_state import Loss, TaskEnd
from flotilla.trainer import events
from flotilla.trainer.config.cluster import DeadlinesConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Task
from flotilla.trainer.runtime.errors import BEGIN_AGAIN, UserError

log = logging.getLogger(__name__)
REPORTED = 3
# Seconds between two reads of a job's events while pods are missing.
LOOK_SECONDS = 5.0
# Event reasons of the training operator and the Job controller if a pod cannot be created.
_REFUSALS = ("FailedCreatePod", "FailedCreate")
# Messages of permanent refusals by the API server's admission control. Every retry fails too.
_FINAL = re.compile(r" is forbidden: | is invalid: |admission webhook .* denied the request")
# Messages about transient causes: other jobs use the quota, or a pod of this name still exists.
_TEMPORARY = re.compile(r"exceeded quota: |object is being deleted|already exists")
_ADMISSION = "Kueue suspends the job until its queue has capacity; see: kubectl get workloads"
# Maximum number of tasks that a message names.
_NAMED = 5
_REMEDIES = {
    "image": (
        "correct --image or cluster.kubernetes.pod.image, or add the secret of the registry to "
        "cluster.kubernetes.pod.image_pull_secrets"
    ),
    "container": "fix the reported cause, or correct the settings in cluster.kubernetes.pod",
}


class Deadlines:
    """The current stage of a job, and the deadlines that apply in it.

    Once all tasks have run at the same time, the stage stays `running`, whatever the tasks do,
    until the job is suspended or recreated. `is_taken_up` is true once the engine's
    controller has reacted to the job.
    """

    def __init__(
        self,
        engine: Engine,
        config: DeadlinesConfig,
        expected: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the engine, the deadlines (0 for none) and the number of tasks of each role."""
        self._engine, self._config, self._expected, self._clock = engine, config, expected, clock
        self.expected_pods = sum(expected.values())
        self._uid, self._made_at = "", clock()
        self.is_taken_up = self._is_suspended = self._is_put_back = False
        # Total running time of earlier jobs of this run, in seconds.
        self._ran = 0.0
        self._stage, self._entered_at = pod_state.QUEUEING, clock()
        self.begin_again()

    def begin_again(self) -> None:
        """Enter the stage `queueing` of a new job."""
        if self.has_run:
            self._ran += self._clock() - self._entered_at
        self._stage = pod_state.QUEUEING
        self._entered_at = self._progressed_at = self._clock()
        # The time at which each pod first failed to start, by pod uid.
        self._failing_since: dict[str, float] = {}
        # The guard's report about names that do not resolve; empty if all resolve.
        self.unresolved = ""

    @property
    def is_training(self) -> bool:
        """Whether the global step has changed since all tasks started to run."""
        return self.has_run and self._progressed_at > self._entered_at

    @property
    def has_run(self) -> bool:
        """Whether all tasks have run at the same time."""
        return self._stage == pod_state.RUNNING

    def observe_job(self, job: Tree) -> None:
        """Record whether the controller has accepted the job, and whether it is suspended."""
        uid = job["metadata"]["uid"]
        if uid != self._uid:
            self._uid, self._made_at, self.is_taken_up = uid, self._clock(), False
        if self._engine.is_taken_up(job):
            self.is_taken_up = True
        suspended = self._engine.is_suspended(job)
        if suspended and not self._is_suspended:
            self._is_put_back = self.has_run
            if self.has_run:
                self._ran += self._clock() - self._entered_at
            log.info(
                "the job is suspended until %s",
                "its queue has capacity again" if self._is_put_back else "its queue admits it",
            )
            events.emit(events.Suspension(is_over=False, was_running=self._is_put_back))
            self._enter(pod_state.QUEUEING)
        elif self._is_suspended and not suspended:
            log.info("the job is no longer suspended, and its pods are starting")
            events.emit(events.Suspension(is_over=True, was_running=self._is_put_back))
            self._is_put_back = False
            self._entered_at = self._progressed_at = self._clock()
        self._is_suspended = suspended

    def observe(self, every: Collection[Tree]) -> None:
        """Update the stage from the current pods."""
        pods = self._newest_pods(every)
        if pods:
            self.is_taken_up = True
        now = self._clock()
        failing = [each["metadata"]["uid"] for each in pods if pod_state.start_failure(each)]
        self._failing_since = {uid: self._failing_since.get(uid, now) for uid in failing}
        if self._stage == pod_state.RUNNING or self._is_suspended:
            return
        stages = [pod_state.stage(pod) for pod in pods]
        if len(stages) < self.expected_pods or pod_state.QUEUEING in stages:
            self._enter(pod_state.QUEUEING)
        else:
            self._enter(pod_state.STARTING if pod_state.STARTING in stages else pod_state.RUNNING)

    def lacks_pods(self, pods: Collection[Tree]) -> bool:
        """Return whether pods are missing that the controller should have created."""
        return len(self._newest_pods(pods)) < self.expected_pods and not self._is_suspended

    def restart_progress(self) -> None:
        """Restart the deadline for progress after a change of the global step."""
        self._progressed_at = self._clock()

    def seconds_left(self) -> float:
        """Return the seconds until the next deadline, or infinity if there is none."""
        return min(self._ends().values(), default=math.inf) - self._clock()

    def find_exceeded(self, every: Collection[Tree]) -> str:
        """Return a message if a pod cannot start or a deadline is exceeded, or an empty string."""
        pods = self._newest_pods(every)
        malformed = [pod for pod in pods if pod_state.start_failure(pod) == pod_state.MALFORMED]
        if malformed and not self.has_run:
            return _explain_pods(malformed, "")
        late = [key for key, end in self._ends().items() if end <= self._clock()]
        return self._describe_exceeded(late[0], pods) if late else ""

    def _describe_exceeded(self, key: str, pods: Collection[Tree]) -> str:
        seconds = getattr(self._config, key)
        limit = f"{seconds:g} s (cluster.kubernetes.deadlines.{key})"
        of_the_job = {
            "operator": silent_controller(
                self._engine.kind, seconds, "the job has neither a status nor a pod"
            ),
            "stalling": f"training has made no progress for {limit}",
            "running": f"training did not finish within {limit}",
        }
        if key in of_the_job:
            return of_the_job[key]
        if key == "container":
            return _explain_pods([pod for pod in pods if pod_state.start_failure(pod)], limit)
        return self._waiting(pods, key, limit)

    def start(self, every: Collection[Tree]) -> tuple[int, str]:
        """Return the number of running tasks, and a text about what delays the start of training.

        The text includes the reasons that Kubernetes gives for waiting pods.
        """
        pods = self._newest_pods(every)
        running = sum(pod_state.stage(pod) == pod_state.RUNNING for pod in pods)
        if not self.is_taken_up:
            return running, f"the {self._engine.kind.controller} has not accepted the job"
        if self._is_suspended:
            return running, _ADMISSION
        of_roles = (
            _start_of_role(role, count, [p for p in pods if pod_state.find_task(p).role == role])
            for role, count in self._expected.items()
        )
        if words := "; ".join(filter(None, of_roles)):
            return running, words
        words = "all tasks are running, but training has not completed a step yet"
        return running, f"{words}; {self.unresolved}" if self.unresolved else words

    def _waiting(self, pods: Collection[Tree], stage: str, limit: str) -> str:
        waiting = [pod for pod in pods if pod_state.stage(pod) == stage]
        if stage == pod_state.QUEUEING and self._is_suspended:
            return f"the job was not admitted within {limit}: {_ADMISSION}"
        missing = self.expected_pods - len(pods)
        if stage == pod_state.QUEUEING and missing > 0:
            return f"{missing} of {self.expected_pods} pods were not created within {limit}"
        what = "could not be scheduled" if stage == pod_state.QUEUEING else "did not start"
        return _sentence(waiting, f"{what} within {limit}")

    def _newest_pods(self, pods: Collection[Tree]) -> list[Tree]:
        return list(pod_state.newest(pods).values())

    def _enter(self, stage: str) -> None:
        if stage != self._stage:
            self._stage = stage
            self._entered_at = self._progressed_at = self._clock()

    def _ends(self) -> dict[str, float]:
        # A job that was suspended while running has no queueing deadline, because its waiting time
        # depends on the job that took its capacity.
        since = {} if self._is_put_back else {self._stage: self._entered_at}
        if not self.is_taken_up:
            since["operator"] = self._made_at
        if self._stage == pod_state.RUNNING:
            since["stalling"] = self._progressed_at
        elif self._failing_since:
            since["container"] = min(self._failing_since.values())
        limits = {key: getattr(self._config, key) for key in since}
        if self._stage == pod_state.RUNNING:
            since[pod_state.RUNNING] -= self._ran
        return {key: since[key] + limit for key, limit in limits.items() if limit}


def _explain_pods(pods: Collection[Tree], limit: str) -> str:
    kind = "image" if any("Image" in pod_state.start_failure(pod) for pod in pods) else "container"
    what = f"did not start within {limit}" if limit else "cannot start"
    return f"{_sentence(pods, what)}; {_REMEDIES[kind]}"


def _start_of_role(role: str, expected: int, pods: Collection[Tree]) -> str:
    parts = [f"{expected - len(pods)} not created"] if len(pods) < expected else []
    for stage, what in ((pod_state.QUEUEING, "without a node"), (pod_state.STARTING, "starting")):
        waiting = [pod for pod in pods if pod_state.stage(pod) == stage]
        reasons = dict.fromkeys(filter(None, map(pod_state.waiting_reason, waiting)))
        reason = " ".join(next(iter(reasons), "").split())
        if waiting and all(map(pod_state.waits_as_usual, waiting)):
            reason = f"{reason}: Kubernetes is pulling images or mounting volumes"
        if waiting:
            parts.append(f"{len(waiting)} {what}{f' ({reason})' if reason else ''}")
    running = sum(pod_state.stage(pod) == pod_state.RUNNING for pod in pods)
    return f"{role} {running}/{expected}: {', '.join(parts)}" if parts else ""


def _sentence(pods: Collection[Tree], what: str) -> str:
    names = sorted(str(pod_state.find_task(pod)) for pod in pods)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    tasks = f"{', '.join(names[:_NAMED])}{more}"
    reason = next(filter(None, map(pod_state.waiting_reason, pods)), "")
    return ": ".join(filter(None, [f"{tasks} {what}", " ".join(reason.split())]))


def last_events(api: Api, *uids: str) -> str:
    """Return a suffix for an error message with the last events of objects, or an empty string.

    If the permission to list events is missing, the result states this. If the events cannot be
    read for another reason, the result is empty.
    """
    try:
        found = sorted((each for uid in uids for each in _events(api, uid)), key=_read_time)
    except UnreachableError:
        return ""
    except RefusedError as error:
        if error.code == HTTPStatus.FORBIDDEN:
            return "; the launcher lacks permission to list events"
        return ""
    lines = (f"{each.get('reason')}: {each.get('message')}" for each in found[-REPORTED:])
    text = " ".join(" | ".join(lines).split())
    return f"; last events: {text}" if text else ""


def _events(api: Api, uid: str) -> list[Tree]:
    found, _ = api.list_objects(EVENTS, {"fieldSelector": f"involvedObject.uid={uid}"})
    return sorted(found, key=_read_time)


def _read_time(event: Tree) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))


def is_final(refusal: str) -> bool:
    """Return whether the refusal of a pod with this message is permanent."""
    return bool(_FINAL.search(refusal)) and not _TEMPORARY.search(refusal)


class PodRefusals:
    """Finds out why pods of a job are missing."""

    def __init__(
        self, api: Api, kind: JobKind, reporters: Callable[[], Sequence[str]], deadlines: Deadlines
    ) -> None:
        """Store the arguments. Events are read for the uids that `reporters` returns."""
        self._api, self._kind, self._reporters = api, kind, reporters
        self._deadlines = deadlines
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._logged: set[str] = set()
        self.newest = ""

    def final(self) -> str:
        """Return why a job that has not run can never get its pods, or an empty string."""
        if time.monotonic() < self._look_at:
            return ""
        self._look_at = time.monotonic() + LOOK_SECONDS
        try:
            found = [each for uid in self._reporters() for each in _events(self._api, uid)]
        except (RefusedError, UnreachableError) as error:
            log.debug("the events of the job cannot be read: %s", error)
            return ""
        if found:
            self._deadlines.is_taken_up = True
        messages = [str(each.get("message")) for each in found if each.get("reason") in _REFUSALS]
        if not messages:
            self.newest = ""
            return ""
        newest = self.newest = " ".join(messages[-1].split())
        if is_final(newest) and not self._deadlines.has_run:
            return newest
        # Ignore names and numbers, which differ between attempts.
        key = re.sub(r'"[^"]*"|\d+', "", newest)
        if key not in self._logged:
            self._logged.add(key)
            log.warning("the %s cannot create all pods yet: %s", self._kind.controller, newest)
        return ""


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
