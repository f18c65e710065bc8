"""Watches one job until it ends: handles events of the job and its pods, and reports failures.

If a pod is lost, the engine's controller replaces the pod or fails the job. In the latter case,
`Supervisor.run` returns the loss, and the launcher recreates the job.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from flotilla.components.kubernetes.client import (
    Api,
    RefusedError,
    UnreachableError,
    describe_foreign_deletion,
    describe_refusal,
    unreachable,
)
from flotilla.components.kubernetes.engine import Engine, JobEnd
from flotilla.components.kubernetes.limits import Deadlines, PodRefusals, Restarts, last_events
from flotilla.components.kubernetes.logs import Logs
from flotilla.components.kubernetes.names import PODS, Tree
from flotilla.components.kubernetes.pods import pod_state
from flotilla.components.kubernetes.pods.pod_state import Loss, TaskEnd
from flotilla.components.kubernetes.pods.template import leading
from flotilla.trainer import events
from flotilla.trainer.cluster.launcher import Job, require_end
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime.errors import (
    DONE,
    FAILED,
    TRY_AGAIN,
    USAGE,
    RunInterruptedError,
    TransientError,
    UserError,
    error_for_exit,
)

log = logging.getLogger(__name__)
# Maximum number of seconds between two checks of the deadlines.
CHECK_SECONDS = 5.0
# Seconds to wait for the rest of a log after its task has ended.
DRAIN_SECONDS = 10.0
# A working controller recreates a lost pod within this many seconds.
ABSENT_SECONDS = 30.0
# Seconds to wait for the events of deleted pods after the job has ended.
SETTLE_SECONDS = 10.0

# One of: an object and whether it was deleted; a restart that a guard logged; the error of a
# refused watch or heartbeat; the error of a takeover by another launcher; None for an interrupt.
JobEvent = tuple[Tree, bool] | events.Restart | RefusedError | UserError | None
JobEvents = queue.SimpleQueue[JobEvent]


@dataclass
class Supervisor:
    """Handles the events of a job and its pods one after another.

    `created` is the job as returned by the API.
    """

    engine: Engine
    job: Job
    created: Tree
    api: Api
    logs: Logs
    deadlines: Deadlines
    restarts: Restarts
    job_events: JobEvents

    def __post_init__(self) -> None:
        """Begin without any event."""
        self._kind = self.engine.kind
        self._name = self.created["metadata"]["name"]
        self._uid = self.created["metadata"]["uid"]
        self._leader = leading(self.job.config)
        self._refusals = PodRefusals(self.api, self._kind, self._reporters, self.deadlines)
        self._interrupts = 0
        self._is_blind = self._is_holding = False
        self._is_job_deleted = False
        self._pods: dict[str, Tree] = {}
        self._last_seen: dict[str, Tree] = {}
        self._gone: set[str] = set()
        self._ends: dict[tuple[str, int], TaskEnd] = {}
        self._losses: dict[str, Loss] = {}
        self._seen: dict[Task, list[str]] = {}
        self._logged_reasons: set[tuple[str, str]] = set()
        # Lost pods that the controller must replace, and pods that ended because of a suspension.
        self._to_bring_back: dict[str, Tree] = {}
        self._suspended: set[str] = set()
        # The uids of Jobs that the engine deleted to replace a lost pod.
        self._deleted_jobs: set[str] = set()
        # Time of the last request for a new pod, by task.
        self._asked_at: dict[Task, float] = {}
        self._start: Work | None = None

    def run(self) -> Loss | None:
        """Watch the job, and return None if it succeeded, or the loss of a pod that made it fail.

        Raises:
            UserError: the job failed, was deleted, or exceeded a deadline.
            RunInterruptedError: the launcher was interrupted.
        """
        try:
            return self._run()
        finally:
            self._end_start()

    def _run(self) -> Loss | None:
        while True:
            left = CHECK_SECONDS if self._is_holding else self.deadlines.seconds_left()
            job_event = self._next(min(CHECK_SECONDS, left))
            if self._interrupts:
                raise RunInterruptedError("interrupted")
            if job_event is None:
                self._check_deadlines()
            elif isinstance(job_event, events.Restart):
                self._count_in_pod(job_event)
            elif self._handle(*job_event):
                # Events may be late, so read the pods again before the job and its logs are gone.
                self._refresh_pods()
                item = job_event[0]
                end = self.engine.end(item) if item["kind"] == self._kind.kind else None
                if end and not end.is_done:
                    return self._lost(item, end)
                self.logs.drain(DRAIN_SECONDS, self._leader)
                return None

    def wait_until_deleted(self, seconds: float) -> bool:
        """Wait until the job and its pods are deleted, and return whether this happened in time."""
        end = time.monotonic() + seconds
        while not self._is_job_deleted or self._pods:
            left = end - time.monotonic()
            if left <= 0 or self._is_blind:
                return False
            job_event = self._next(min(left, CHECK_SECONDS))
            if isinstance(job_event, tuple):
                self._observe(*job_event)
            elif job_event is None:
                self._forget_absent()
            if self._interrupts > 1:
                raise RunInterruptedError(
                    "interrupted twice; the last published checkpoint is intact"
                )
        return True

    def leader_runs(self) -> bool:
        """Return whether the leading task is known to run or to save a checkpoint."""
        pods = [pod for pod in self._pods.values() if pod_state.find_task(pod) == self._leader]
        return any(map(pod_state.is_alive, pods))

    def termination_message(self) -> str:
        """Return the last termination message of the leading task, or an empty string."""
        messages = [end.message for end in self._ends.values() if end.task == self._leader]
        return messages[-1] if messages else ""

    def _next(self, seconds: float) -> tuple[Tree, bool] | events.Restart | None:
        """Return the next event, or None on a timeout or an interrupt of the launcher."""
        try:
            job_event = self.job_events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        if isinstance(job_event, RefusedError):
            self._is_blind = True
            raise UserError(describe_refusal(job_event, self._kind))
        if isinstance(job_event, UserError):
            self._is_blind = True
            raise job_event
        self._interrupts += job_event is None
        return job_event

    def _handle(self, item: Tree, deleted: bool) -> bool:
        """Handle an event, and return whether the job is over."""
        new_ends = self._observe(item, deleted)
        if item["metadata"]["uid"] == self._uid:
            over = self.engine.end(item)
            if over and over.is_done:
                return True
            if deleted or item["metadata"].get("deletionTimestamp"):
                raise UserError(describe_foreign_deletion(self._name))
            return over is not None
        # If the leading task has succeeded, do not wait for the job's status, because the
        # controller may be down, or unable to create a pod.
        if any(end.task == self._leader and end.is_done for end in new_ends):
            return True
        for end in new_ends:
            self._count_restart(end)
        self._check_deadlines()
        return False

    def _observe(self, item: Tree, deleted: bool) -> list[TaskEnd]:
        """Record an object, and return the ends of tasks that were not known before."""
        uid = item["metadata"]["uid"]
        if item["kind"] == self._kind.kind:
            self._is_job_deleted = self._is_job_deleted or (deleted and uid == self._uid)
            if uid == self._uid and not deleted:
                self.deadlines.observe_job(item)
                if self.engine.is_suspended(item):
                    self._suspended |= self._pods.keys()
            return []
        if uid in self._gone or not self.engine.owns(self._uid, item):
            return []
        self._last_seen[uid] = item
        self.logs.follow(item)
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
        self.deadlines.observe(self._pods.values())
        return new

    def _observe_loss(self, pod: Tree, deleted: bool) -> None:
        uid, loss = pod["metadata"]["uid"], pod_state.loss(pod)
        # The pod was deleted by force or during an outage, so its status does not show a reason.
        if deleted and not loss and not pod_state.has_ended(pod):
            loss = pod_state.loss(pod, is_absent=True)
        if loss:
            first = self._losses.get(uid, loss)
            self._losses[uid] = replace(loss, version=first.version)
        seen = self._seen.setdefault(pod_state.find_task(pod), [])
        if uid not in seen:
            seen.append(uid)

    def _log_waiting(self, pod: Tree) -> None:
        reason = pod_state.waiting_reason(pod)
        # Ignore the rest of the message, which contains elapsed seconds.
        key = (pod["metadata"]["uid"], reason.partition(":")[0])
        if reason and key not in self._logged_reasons:
            self._logged_reasons.add(key)
            level = logging.INFO if pod_state.waits_as_usual(pod) else logging.WARNING
            log.log(level, "%s is waiting: %s", pod_state.find_task(pod), reason)

    def _count_in_pod(self, restart: events.Restart) -> None:
        if not self.restarts.count_in_pod(restart):
            raise UserError(
                f"cluster.max_restarts ({self.restarts.limit}) is exceeded: {restart.task} ended "
                f"with {restart.cause}"
            )

    def _count_restart(self, end: TaskEnd) -> None:
        # A worker of a user's program may end before the leading task. A worker of the trainer must
        # not end before training is complete.
        is_own = not self.job.config.program.command
        if is_own and end.is_done and end.task.role != "evaluator" and not self._is_ending():
            require_end(self.job, f"{end.task} (pod {end.pod})")
        # Count no restart if the job is failing. Its tasks end with arbitrary exit codes.
        if end.is_done or end.uid in self._suspended or self._is_ending():
            return
        # A deleted Job may have recreated its pod just before.
        owners = self._last_seen[end.uid]["metadata"].get("ownerReferences") or []
        if not self._deleted_jobs.isdisjoint(owner["uid"] for owner in owners):
            return
        if self.engine.fails_with_a_pod and end.code == DONE:
            return
        if self.restarts.count(end, self._cause(end)):
            self._lose(end)
            return
        self.logs.drain(DRAIN_SECONDS, end.task)
        report = self._describe(end)
        raise UserError(f"cluster.max_restarts ({self.restarts.limit}) is exceeded: {report}")

    def _cause(self, end: TaskEnd) -> str:
        loss = self._losses.get(end.uid)
        is_taken = loss and not self.engine.fails_with_a_pod and end.pod_deleted
        return loss.cause if loss and is_taken else ""

    def _lose(self, end: TaskEnd) -> None:
        pod = self._last_seen.get(end.uid)
        if pod is None or self.engine.fails_with_a_pod or self.restarts.is_final(end):
            return
        # Compare creation times, because pods are listed by name, and a Job's failed pods remain.
        every = [self._last_seen[uid] for uid in self._seen[end.task]]
        is_last = not any(pod_state.is_older(pod, each) for each in every)
        if is_last and (end.uid in self._gone or pod_state.has_ended(pod)):
            self._to_bring_back[end.uid] = pod
            self._bring_back()

    def _bring_back(self) -> None:
        """Make the controller replace lost pods. Retry later if the API is unreachable."""
        for uid, pod in list(self._to_bring_back.items()):
            task = pod_state.find_task(pod)
            try:
                if not self._is_back(pod):
                    self._deleted_jobs |= self.engine.bring_back(self.api, pod)
            except UnreachableError as error:
                log.debug("%s will be recreated later: %s", task, error)
                continue
            except RefusedError as error:
                log.warning("Kubernetes delays the restart of %s (back-off): %s", task, error)
            else:
                log.warning(
                    "%s lost its pod %s; the %s is recreating it",
                    task, pod["metadata"]["name"], self._kind.controller,
                )  # fmt: skip
                self._asked_at[task] = time.monotonic()
            del self._to_bring_back[uid]

    def _is_back(self, lost: Tree) -> bool:
        return any(
            pod["metadata"]["uid"] != lost["metadata"]["uid"]
            and pod_state.find_task(pod) == pod_state.find_task(lost)
            and _is_active(pod)
            for pod in self._list_pods()
            if self.engine.owns(self._uid, pod)
        )

    def _is_ending(self) -> bool:
        """Return whether the job needs no pods: it is finished, failing, deleted or suspended."""
        try:
            job = self.api.get(self._kind.resource, self._name)
        except UnreachableError:
            return False
        except RefusedError as error:
            return error.is_missing
        metadata = job["metadata"]
        is_deleted = bool(metadata.get("deletionTimestamp")) or metadata["uid"] != self._uid
        is_over = self.engine.end(job) is not None
        if is_deleted or is_over or self.engine.is_suspended(job):
            return True
        with suppress(RefusedError, UnreachableError):
            return self.engine.is_failing(self.api, job)
        return False

    def _lost(self, job: Tree, end_of_job: JobEnd) -> Loss | None:
        """Return the loss that failed the job; None if the leader succeeded. Raises `UserError`."""
        if any(end.task == self._leader and end.is_done for end in self._ends.values()):
            return None
        loss = pod_state.first_loss(
            each
            for each in self._losses.values()
            if each.task.role in end_of_job.roles and each.uid == self._seen[each.task][-1]
        )
        failed = [end for end in self._ends.values() if end.code != DONE and not end.pod_deleted]
        final = [end for end in failed if self.restarts.is_final(end)]
        if loss is None or final:
            message = self._job_failure(job, failed, final)
            raise error_for_exit(final[0].code if final else None)(message)
        return loss

    def _job_failure(self, job: Tree, failed: list[TaskEnd], final: list[TaskEnd]) -> str:
        failure = self.engine.failure(self.api, job)
        message = failure.message
        if failure.is_past_deadline:
            limit = self.job.config.cluster.kubernetes.job.active_deadline_seconds
            return (
                f"the job {self._name} did not finish within {limit} s "
                f"(cluster.kubernetes.job.active_deadline_seconds): {message}"
            )
        for end in self._ends.values():
            self.logs.drain(DRAIN_SECONDS, end.task)
        if final:
            return self._describe(final[0])
        last = [self._describe(end) for end in failed[-1:]]
        report = "; ".join([f"the job {self._name} failed: {message}", *last])
        return f"{report}{self._last_events()}"

    def _describe(self, end: TaskEnd) -> str:
        """Return a failed task's report: its message if that explains the exit, else the cause."""
        explains = end.code in (FAILED, TRY_AGAIN, USAGE) or self.job.config.program.command
        if explains and end.message:
            return f"{end.message} ({end.task}, pod {end.pod})"
        report = (
            f"{end.task} ended with {end.cause} (pod {end.pod}){last_events(self.api, end.uid)}"
        )
        lines = " | ".join(self.logs.tail(end.task)) or end.message
        return f"{report}; last log lines: {lines}" if lines and end.code is not None else report

    def _list_pods(self) -> list[Tree]:
        return self.api.list_labelled(PODS, self._kind.selector(self._name))

    def _last_events(self) -> str:
        uids = [self._uid]
        with suppress(RefusedError, UnreachableError):
            uids = [*self._reporters()]
        return last_events(self.api, *uids)

    def _reporters(self) -> Sequence[str]:
        return self.engine.reporters(self.api, self.created)

    def _refresh_pods(self) -> None:
        """Record the current pods, and wait for the watch events of pods that no longer exist."""
        try:
            pods = self._list_pods()
        except (RefusedError, UnreachableError):
            return
        listed = {pod["metadata"]["uid"] for pod in pods}
        end = time.monotonic() + SETTLE_SECONDS
        while self._pods.keys() - listed and not self._interrupts and time.monotonic() < end:
            job_event = self._next(end - time.monotonic())
            if isinstance(job_event, tuple):
                self._observe(*job_event)
        for pod in pods:
            self._observe({**pod, "kind": "Pod"}, False)

    def _forget_absent(self) -> None:
        """Forget pods, and the job, if the watches missed their deletion, as in an outage."""
        with suppress(RefusedError, UnreachableError):
            uids = {pod["metadata"]["uid"] for pod in self._list_pods()}
            self._pods = {uid: pod for uid, pod in self._pods.items() if uid in uids}
        try:
            job = self.api.get(self._kind.resource, self._name)
            self._is_job_deleted |= job["metadata"]["uid"] != self._uid
        except RefusedError as error:
            self._is_job_deleted |= error.is_missing
        except UnreachableError as error:
            log.debug("cannot determine whether the job is deleted: %s", error)

    def _report_start(self) -> None:
        if self.deadlines.is_training:
            self._end_start()
            return
        if self._start is None:
            self._start = Work("starting the job", "tasks", self.deadlines.expected_pods)
            self._start.__enter__()
        pods = self._pods.values()
        running, words = self.deadlines.start(pods)
        if self._refusals.newest and self.deadlines.lacks_pods(pods):
            words = f"{words}: {self._refusals.newest}"
        self._start.reach(running, words)

    def _end_start(self) -> None:
        if self._start:
            self._start.__exit__()
            self._start = None

    def _warn_of_absent(self) -> None:
        """Warn once if a lost pod is not recreated. Its controller may be down."""
        newest = pod_state.newest(self._pods.values())
        for task, at in list(self._asked_at.items()):
            is_back = task in newest and _is_active(newest[task])
            is_late = time.monotonic() - at >= ABSENT_SECONDS
            if is_back or is_late:
                del self._asked_at[task]
            if is_late and not is_back:
                log.warning(
                    "%s has no new pod after %g s: the %s is not running, or it cannot create the "
                    "pod; check with: %s",
                    task, ABSENT_SECONDS, self._kind.controller, self._kind.show,
                )  # fmt: skip

    def _check_deadlines(self) -> None:
        self._bring_back()
        self._warn_of_absent()
        self._report_start()
        pods = self._pods.values()
        refusal = self._refusals.final() if self.deadlines.lacks_pods(pods) else ""
        if refusal:
            raise UserError(f"Kubernetes rejects the pods of the job {self._name}: {refusal}")
        exceeded = self._find_exceeded()
        if exceeded:
            # A controller that has not reacted may be down and come back, so a retry may help.
            kind = UserError if self.deadlines.is_taken_up else TransientError
            raise kind(f"{exceeded} (job {self._name}){self._last_events()}")
        limit = self.job.config.cluster.kubernetes.deadlines.unreachable
        if limit and time.monotonic() - self.api.answered_at > limit:
            raise TransientError(unreachable(limit, f"the job {self._name} may still be running"))

    def _find_exceeded(self) -> str:
        """Return a message if a deadline is exceeded even after reading the current state."""
        seen = self.deadlines.find_exceeded(self._pods.values())
        self._is_holding = False
        if not seen:
            return ""
        try:
            self.deadlines.observe_job(self.api.get(self._kind.resource, self._name))
            pods = [pod for pod in self._list_pods() if self.engine.owns(self._uid, pod)]
        except RefusedError:
            return seen
        except UnreachableError:
            self._is_holding = True
            return ""
        self.deadlines.observe(pods)
        return self.deadlines.find_exceeded(pods)


def _is_active(pod: Tree) -> bool:
    return not pod["metadata"].get("deletionTimestamp") and not pod_state.has_ended(pod)
