"""Watch one job to its end: handle its events and those of its pods, and report its failure.

A restart of a task is the operator's work, but for one case: a pod that is deleted, evicted or
preempted counts as failed for the operator, which fails the whole job. `Supervisor.run` returns
that loss, and the launcher makes the job again.

Flotilla counts the restarts of all tasks, since the operator's `backoffLimit` counts those of
running pods only, and ends the job past `cluster.max_restarts`. A failure is reported in one line:
which task, how it ended, what it and Kubernetes wrote about it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from components.kubernetes import names
from components.kubernetes.api.client import Api, RefusedError, UnreachableError
from components.kubernetes.api.retry import deleted_by_another, refused, unreachable
from components.kubernetes.deadlines import Deadlines
from components.kubernetes.kubernetes_events import PodRefusals, last_events
from components.kubernetes.logs import Logs
from components.kubernetes.names import Tree
from components.kubernetes.pods import pod_state
from components.kubernetes.pods.pod_state import Loss, TaskEnd
from components.tfjob.manifest import leading, restart_policy
from trainer import events
from trainer.cluster import completion
from trainer.cluster.launcher import Job
from trainer.config.schema import Config
from trainer.errors import (
    BEGIN_AGAIN,
    DONE,
    FAILED,
    TRY_AGAIN,
    USAGE,
    RunInterruptedError,
    TransientError,
    UserError,
)
from trainer.topology import Task

log = logging.getLogger(__name__)
# At least so often the deadlines are checked, whether or not an event comes.
CHECK_SECONDS = 5.0
# How long the rest of a log is waited for once its task has ended.
DRAIN_SECONDS = 10.0
# How long the events of pods that are gone are waited for once the job has failed.
SETTLE_SECONDS = 10.0
# The operator's policy `ExitCode` restarts a task that ends with this code or a higher one.
RETRYABLE = 128

# An object and whether it was deleted, what the API refused to watch, or None: interrupted.
JobEvent = tuple[Tree, bool] | RefusedError | None
JobEvents = queue.SimpleQueue[JobEvent]


def report_of(api: Api, end: TaskEnd, log_tail: Iterable[str]) -> str:
    """Return the report of a task that has failed."""
    if end.code in (FAILED, TRY_AGAIN, USAGE) and end.message:
        return f"{end.message} ({end.task}, pod {end.pod})"
    report = f"{end.task} ended with {end.cause} (pod {end.pod}){last_events(api, end.uid)}"
    lines = " | ".join(log_tail) or end.message
    return f"{report}; its last lines: {lines}" if lines and end.code is not None else report


class Restarts:
    """The restarts of all tasks of a run together.

    Pods that are taken away are no fault of training: they draw on `cluster.max_restarts` only
    until training has published a newer checkpoint. So a job on machines that come and go trains
    on, and one that never gets as far as a checkpoint ends.
    """

    def __init__(self, config: Config) -> None:
        """Count from 0 up to `cluster.max_restarts`."""
        self.limit = config.cluster.max_restarts
        self._config = config
        # Progress is reported by the thread that reads the leader's log.
        self._lock = threading.Lock()
        self._count = self._drawn = 0
        self._newest = -1
        # Pods that were taken away since the newest checkpoint.
        self._losses: Counter[Task] = Counter()
        # The pods whose end is counted: the operator may notice their deletion after it.
        self._counted: set[str] = set()
        # The count at the time when each task was last started.
        self._count_at_start: dict[Task, int] = {}

    def is_final(self, end: TaskEnd) -> bool:
        """Return whether the operator does not restart the task, so that the job fails."""
        policy = restart_policy(self._config, end.task.role)
        if policy == "ExitCode":
            return end.code is not None and end.code < RETRYABLE
        return policy == "Never"

    def progressed(self, step: int) -> None:
        """Take note of a published checkpoint: a newer one than all before is progress."""
        with self._lock:
            if step > self._newest:
                self._newest = step
                self._drawn -= self._losses.total()
                self._losses.clear()

    def count(self, end: TaskEnd) -> bool:
        """Count the restart of a task; False where the limit had been reached before."""
        if self.is_final(end):
            return True
        # A task that begins again because another one was lost belongs to the same incident.
        same = end.code == BEGIN_AGAIN and self._count_at_start.get(end.task, 0) < self._count
        # Training does not depend on the evaluator.
        if not same and end.task.role != "evaluator":
            taken = end.pod_deleted or end.code is None
            if not self._draw(end.task if taken else None):
                return False
        self._counted.add(end.uid)
        self._count_at_start[end.task] = self._count
        self._emit(end.task, end.cause)
        return True

    def count_loss(self, loss: Loss) -> None:
        """Count a lost pod with which the job has failed; raises `UserError` past the limit."""
        if loss.uid in self._counted:
            return
        if not self._draw(loss.task):
            losses = self._losses + Counter([loss.task])
            each = ", ".join(f"{task} {count}" for task, count in sorted(losses.items(), key=str))
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


class Supervisor:
    """Handles the events of a job and of its pods, one after the other."""

    def __init__(
        self,
        job: Job,
        created: Tree,
        api: Api,
        logs: Logs,
        deadlines: Deadlines,
        restarts: Restarts,
        job_events: JobEvents,
    ) -> None:
        """Take the run, the job as the API created it, and the queue that its watches fill.

        `deadlines` and `restarts` are those of the run, over all jobs that it needs.
        """
        self._name = created["metadata"]["name"]
        self._uid = created["metadata"]["uid"]
        self._job, self._leader = job, leading(job.config)
        self._unreachable = job.config.cluster.kubernetes.deadlines.unreachable
        self._api = api
        self._logs = logs
        self._deadlines = deadlines
        self._job_events = job_events
        self._restarts = restarts
        self._refusals = PodRefusals(api, self._uid, deadlines)
        self._interrupts = 0
        self._is_blind = self._is_holding = False
        self._is_job_deleted = False
        self._pods: dict[str, Tree] = {}
        self._gone: set[str] = set()
        self._ends: dict[tuple[str, int], TaskEnd] = {}
        self._losses: dict[str, Loss] = {}
        # The pods of each task, in the order in which they appeared.
        self._seen: dict[Task, list[str]] = {}
        self._logged_reasons: set[tuple[str, str]] = set()

    def run(self) -> Loss | None:
        """Return None when the job has succeeded, or the loss with which the operator failed it.

        Raises:
            UserError: it failed, was deleted, or exceeded a deadline.
            RunInterruptedError: the launcher was interrupted; raised at once.
        """
        while True:
            left = CHECK_SECONDS if self._is_holding else self._deadlines.seconds_left()
            job_event = self._next(min(CHECK_SECONDS, left))
            if self._interrupts:
                raise RunInterruptedError("interrupted")
            if job_event is None:
                self._check_deadlines()
            elif self._handle(*job_event):
                # The job's event may come before those of its pods, whose logs are deleted with it.
                self._refresh_pods()
                item = job_event[0]
                if item["kind"] == "TFJob" and pod_state.condition(item, "Failed"):
                    return self._lost(item)
                self._logs.drain(DRAIN_SECONDS, self._leader)
                return None

    def wait_until_deleted(self, seconds: float) -> bool:
        """Wait until neither the job nor a pod is left; return whether that was seen in time."""
        end = time.monotonic() + seconds
        while not self._is_job_deleted or self._pods:
            left = end - time.monotonic()
            if left <= 0 or self._is_blind:
                return False
            job_event = self._next(min(left, CHECK_SECONDS))
            if job_event is not None:
                self._observe(*job_event)
            else:
                self._forget_absent()
            if self._interrupts > 1:
                raise RunInterruptedError(
                    "interrupted twice; the last published checkpoint is intact"
                )
        return True

    def leader_runs(self) -> bool:
        """Return whether the leading task runs, as far as is known."""
        pods = [pod for pod in self._pods.values() if pod_state.task_of(pod) == self._leader]
        return any(map(pod_state.is_running, pods))

    def termination_message(self) -> str:
        """Return the last termination message of the leading task, or an empty string."""
        messages = [end.message for end in self._ends.values() if end.task == self._leader]
        return messages[-1] if messages else ""

    def _next(self, seconds: float) -> tuple[Tree, bool] | None:
        """Return the next event; None where none comes in time, or the launcher is interrupted."""
        try:
            job_event = self._job_events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        if isinstance(job_event, RefusedError):
            self._is_blind = True
            raise UserError(refused(job_event))
        self._interrupts += job_event is None
        return job_event

    def _handle(self, item: Tree, deleted: bool) -> bool:
        """React to an event; return whether the job is over."""
        new_ends = self._observe(item, deleted)
        if item["metadata"]["uid"] == self._uid:
            if pod_state.condition(item, "Succeeded"):
                return True
            if deleted or item["metadata"].get("deletionTimestamp"):
                raise UserError(deleted_by_another(self._name))
            return bool(pod_state.condition(item, "Failed"))
        # The operator writes no status while it is away, or may not make a pod of another task.
        if any(end.task == self._leader and end.is_done for end in new_ends):
            return True
        for end in new_ends:
            self._count_restart(end)
        self._check_deadlines()
        return False

    def _observe(self, item: Tree, deleted: bool) -> list[TaskEnd]:
        """Record an object; return the ends of tasks that were not known before."""
        uid = item["metadata"]["uid"]
        if item["kind"] == "TFJob":
            self._is_job_deleted = self._is_job_deleted or (deleted and uid == self._uid)
            if uid == self._uid and not deleted:
                self._deadlines.observe_job(item)
            return []
        if uid in self._gone or not pod_state.is_owned_by(item, self._uid):
            return []
        self._logs.follow(item)
        self._observe_loss(item, deleted)
        ends = {(end.uid, end.restart_count): end for end in pod_state.ends(item)}
        if deleted:
            self._pods.pop(uid, None)
            self._gone.add(uid)
            if not ends and (uid, pod_state.restart_count(item)) not in self._ends:
                end = pod_state.end_by_deletion(item)
                ends[uid, end.restart_count] = end
        else:
            self._pods[uid] = item
            self._log_waiting(item)
        new = [end for key, end in ends.items() if key not in self._ends]
        self._ends |= ends
        self._deadlines.observe(self._pods.values())
        return new

    def _observe_loss(self, pod: Tree, deleted: bool) -> None:
        uid, loss = pod["metadata"]["uid"], pod_state.loss(pod)
        # Deleted without a trace of why: it was seen last before an outage, or deleted by force.
        if deleted and not loss and not pod_state.has_ended(pod):
            loss = pod_state.loss_of_absent(pod)
        if loss:
            first = self._losses.get(uid, loss)
            self._losses[uid] = replace(loss, version=first.version)
        seen = self._seen.setdefault(pod_state.task_of(pod), [])
        if uid not in seen:
            seen.append(uid)

    def _log_waiting(self, pod: Tree) -> None:
        """Log why a pod does not run, once for each reason."""
        reason = pod_state.waiting_reason(pod)
        # Kubernetes counts seconds in the rest of the message.
        key = (pod["metadata"]["uid"], reason.partition(":")[0])
        if reason and key not in self._logged_reasons:
            self._logged_reasons.add(key)
            level = logging.INFO if pod_state.waits_as_usual(pod) else logging.WARNING
            log.log(level, "%s waits: %s", pod_state.task_of(pod), reason)

    def _count_restart(self, end: TaskEnd) -> None:
        """Count the restart of a task; raise `UserError` past the limit."""
        if end.is_done and end.task.role != "evaluator" and not self._is_ending():
            completion.require(self._job, f"{end.task} (pod {end.pod})")
        # A job that has failed ends all of its tasks, with whatever code.
        if end.code == DONE or self._is_ending() or self._restarts.count(end):
            return
        self._logs.drain(DRAIN_SECONDS, end.task)
        report = report_of(self._api, end, self._logs.tail(end.task))
        raise UserError(f"cluster.max_restarts ({self._restarts.limit}) is exceeded: {report}")

    def _is_ending(self) -> bool:
        """Return whether the job has no use for its pods: finished, deleted, or suspended again."""
        try:
            job = self._api.get_job(self._name)
        except UnreachableError:
            return False
        except RefusedError as error:
            return error.is_missing
        metadata = job["metadata"]
        is_deleted = bool(metadata.get("deletionTimestamp")) or metadata["uid"] != self._uid
        return is_deleted or pod_state.is_finished(job) or pod_state.is_suspended(job)

    def _lost(self, job: Tree) -> Loss | None:
        """Return the loss with which a job has failed; None where its leader was done before.

        Raises:
            TransientError: a task says that it may succeed later.
            UserError: the job has failed for another reason.
        """
        if any(end.task == self._leader and end.is_done for end in self._ends.values()):
            return None
        roles = pod_state.failed_roles(job)
        loss = pod_state.first_loss(
            each
            for each in self._losses.values()
            if each.task.role in roles and each.uid == self._seen[each.task][-1]
        )
        failed = [end for end in self._ends.values() if end.code != DONE and not end.pod_deleted]
        final = [end for end in failed if self._restarts.is_final(end)]
        if loss is None or final:
            kind = TransientError if final and final[0].code == TRY_AGAIN else UserError
            raise kind(self._job_failure(job))
        return loss

    def _job_failure(self, job: Tree) -> str:
        """Return the report of a job that has failed."""
        condition = pod_state.condition(job, "Failed") or {}
        message = " ".join(str(condition.get("message", "")).split())
        if pod_state.is_past_its_deadline(condition):
            limit = job["spec"]["runPolicy"].get("activeDeadlineSeconds")
            return (
                f"the job {self._name} was not done after {limit} s "
                f"(cluster.kubernetes.job.active_deadline_seconds): {message}"
            )
        for end in self._ends.values():
            self._logs.drain(DRAIN_SECONDS, end.task)
        failed = [end for end in self._ends.values() if end.code != DONE and not end.pod_deleted]
        final = [end for end in failed if self._restarts.is_final(end)]
        if final:
            return report_of(self._api, final[0], self._logs.tail(final[0].task))
        last = [report_of(self._api, end, self._logs.tail(end.task)) for end in failed[-1:]]
        report = "; ".join([f"the job {self._name} failed: {message}", *last])
        return f"{report}{last_events(self._api, self._uid)}"

    def _refresh_pods(self) -> None:
        """Record the pods as they are now, those that are gone by their last events."""
        try:
            pods = self._api.labelled("pods", f"{names.JOB_NAME}={self._name}")
        except (RefusedError, UnreachableError):
            return
        listed = {pod["metadata"]["uid"] for pod in pods}
        end = time.monotonic() + SETTLE_SECONDS
        while self._pods.keys() - listed and not self._interrupts and time.monotonic() < end:
            job_event = self._next(end - time.monotonic())
            if job_event is not None:
                self._observe(*job_event)
        for pod in pods:
            self._observe({**pod, "kind": "Pod"}, False)

    def _forget_absent(self) -> None:
        """Forget the pods, and the job, that are gone: a watch after an outage never saw them."""
        with suppress(RefusedError, UnreachableError):
            there = self._api.labelled("pods", f"{names.JOB_NAME}={self._name}")
            uids = {pod["metadata"]["uid"] for pod in there}
            self._pods = {uid: pod for uid, pod in self._pods.items() if uid in uids}
        try:
            self._is_job_deleted |= self._api.get_job(self._name)["metadata"]["uid"] != self._uid
        except RefusedError as error:
            self._is_job_deleted |= error.is_missing
        except UnreachableError as error:
            log.debug("whether the job is deleted is not known: %s", error)

    def _check_deadlines(self) -> None:
        pods = self._pods.values()
        refusal = self._refusals.final() if self._deadlines.lacks_pods(pods) else ""
        if refusal:
            raise UserError(f"the pods of the job {self._name} are refused: {refusal}")
        exceeded = self._exceeded()
        if exceeded:
            # An operator that is away comes back, as after its update.
            kind = UserError if self._deadlines.is_taken_up else TransientError
            raise kind(f"{exceeded} (job {self._name}){last_events(self._api, self._uid)}")
        limit = self._unreachable
        if limit and time.monotonic() - self._api.answered_at > limit:
            raise TransientError(unreachable(limit, f"the job {self._name} may still run"))

    def _exceeded(self) -> str:
        """Return which deadline the job exceeds as it is now: an outage delays its watches."""
        seen = self._deadlines.exceeded(self._pods.values())
        self._is_holding = False
        if not seen:
            return ""
        try:
            self._deadlines.observe_job(self._api.get_job(self._name))
            pods = self._api.labelled("pods", f"{names.JOB_NAME}={self._name}")
        except RefusedError:
            return seen
        except UnreachableError:
            self._is_holding = True
            return ""
        self._deadlines.observe(pods)
        return self._deadlines.exceeded(pods)
