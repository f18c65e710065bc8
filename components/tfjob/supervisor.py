"""Watch one job to its end: stages, restarts, logs, and what to say when it fails.

The report of a failure in one line: which task, how it ended, what it and Kubernetes said.

How often tasks have been started again: counted here, since the operator counts only some.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterable
from contextlib import suppress

from components.tfjob import names, state
from components.tfjob.client import Api, RefusedError, Tree, UnreachableError
from components.tfjob.deadlines import Stages
from components.tfjob.logs import Logs
from components.tfjob.manifest import leading, replicas, restart_policy
from components.tfjob.retry import refused, unreachable
from components.tfjob.state import Ended
from trainer import events
from trainer.cluster.launcher import Job
from trainer.config.schema import Config
from trainer.errors import BEGIN_AGAIN, DONE, FAILED, USAGE, RunInterruptedError, UserError
from trainer.topology import Task

LAST_EVENTS = 3


class Reporter:
    """Writes reports; what needs a permission that is missing is left out, and said so once."""

    def __init__(self, api: Api) -> None:
        """Ask nothing yet."""
        self._api = api

    def of_task(self, ended: Ended, tail: Iterable[str]) -> str:
        """Return the report of a task that ended badly."""
        if ended.code in (FAILED, USAGE) and ended.words:
            return f"{ended.words} ({ended.task}, pod {ended.pod})"
        said = f"{ended.task} ended with {ended.cause}"
        lines = " | ".join(tail) or ended.words
        last = f"; its last lines: {lines}" if lines and ended.code is not None else ""
        return f"{said} (pod {ended.pod}){self.events(ended.pod)}{last}"

    def events(self, about: str) -> str:
        """Return the last events about an object, or nothing."""
        try:
            found = sorted(self._api.events(about), key=_time)[-LAST_EVENTS:]
        except UnreachableError:
            return ""
        except RefusedError as error:
            if error.is_forbidden:
                return "; its events may not be read with these permissions"
            return ""
        said = (f"{each.get('reason')}: {each.get('message')}" for each in found)
        text = " ".join(" | ".join(said).split())
        return f"; last events: {text}" if text else ""


def _time(event: Tree) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or "")


# Under the operator's policy `ExitCode` a task with a lower code is not started again.
RETRYABLE = 128


class Restarts:
    """The restarts of all tasks of a job together."""

    def __init__(self, config: Config) -> None:
        """Count from 0 up to `cluster.max_restarts`."""
        self.limit = config.cluster.max_restarts
        self._config = config
        self._count = 0
        # How many restarts there had been when a task was last started.
        self._born = {
            Task(role=role, index=index): 0
            for role, number in replicas(config).items()
            for index in range(number)
        }

    def is_final(self, ended: Ended) -> bool:
        """Say whether the operator does not start the task again, so that the job fails."""
        policy = restart_policy(self._config, ended.task.role)
        if policy == "ExitCode":
            return ended.code is not None and ended.code < RETRYABLE
        return policy == "Never"

    def count(self, ended: Ended) -> bool:
        """Count a task that is started again; False where the limit was reached before."""
        if self.is_final(ended):
            return True
        again = ended.code == BEGIN_AGAIN and self._born.get(ended.task, 0) < self._count
        # A task that begins again because another one was lost is the same incident, and training
        # never notices the evaluator.
        if not again and ended.task.role != "evaluator":
            if self._count >= self.limit:
                return False
            self._count += 1
        self._born[ended.task] = self._count
        events.emit("restart", task=str(ended.task), cause=ended.cause, restarts=self._count)
        return True


log = logging.getLogger(__name__)
# What is asked of the API, or waited for, again at least so often.
LOOK_SECONDS = 5.0
DRAIN_SECONDS = 10.0

# An object with whether it is gone, what the API will not tell, or None: an end was asked for.
JobEvent = tuple[Tree, bool] | RefusedError | None
JobEvents = queue.SimpleQueue[JobEvent]


class Supervisor:
    """Takes what happens to a job and its pods, one after the other."""

    def __init__(
        self, job: Job, made: Tree, api: Api, logs: Logs, stages: Stages, happenings: JobEvents
    ) -> None:
        """Take the run, the job as the API made it, and what tells of it."""
        self._asked = 0
        self._name = made["metadata"]["name"]
        self._uid = made["metadata"]["uid"]
        self._leader = leading(job.config)
        self._deadlines = job.config.cluster.kubernetes.deadlines
        self._api = api
        self._logs = logs
        self._stages = stages
        self._happenings = happenings
        self._report = Reporter(api)
        self._restarts = Restarts(job.config)
        self._pods: dict[str, Tree] = {}
        self._gone = False
        self._ended: dict[tuple[str, int], Ended] = {}
        self._hindrances: set[tuple[str, str]] = set()

    def run(self) -> None:
        """Return when the job has succeeded.

        Raises:
            UserError: it failed, was deleted, or took too long.
            RunInterruptedError: an end was asked for; raised at once.
        """
        while True:
            happening = self._next(self._wait_seconds())
            if self._asked:
                raise RunInterruptedError("interrupted")
            if happening is None:
                self._check_deadlines()
            elif self._take(*happening):
                # The job may be told of before its pods, whose logs go with it.
                self._look()
                self._logs.drain(DRAIN_SECONDS, self._leader)
                return

    def words(self) -> str:
        """Return what the leading task said when it ended, or nothing."""
        said = [each.words for each in self._ended.values() if each.task == self._leader]
        return said[-1] if said else ""

    def wait_gone(self, seconds: float) -> bool:
        """Take what happens until neither the job nor a pod is left; say whether that came."""
        end = time.monotonic() + seconds
        while not self._gone or self._pods:
            left = end - time.monotonic()
            if left <= 0:
                return False
            happening = self._next(left)
            if happening is not None:
                self._note(*happening)
            if self._asked > 1:
                raise RunInterruptedError("interrupted twice; the checkpoint before it is whole")
        return True

    def _next(self, seconds: float) -> tuple[Tree, bool] | None:
        """Return what happens next, None when nothing does for so long or an end is asked for."""
        try:
            happening = self._happenings.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        if isinstance(happening, RefusedError):
            raise UserError(refused(happening))
        self._asked += happening is None
        return happening

    def _wait_seconds(self) -> float:
        return min(LOOK_SECONDS, self._stages.seconds_left())

    def _take(self, tree: Tree, gone: bool) -> bool:
        """React to what happened; say whether training is done."""
        new = self._note(tree, gone)
        if tree["metadata"]["uid"] == self._uid:
            if state.condition(tree, "Succeeded"):
                return True
            if gone:
                raise UserError(self._deleted())
            if state.condition(tree, "Failed"):
                raise UserError(self._failed(tree))
            return False
        for ended in new:
            self._restart(ended)
        self._check_deadlines()
        return False

    def _note(self, tree: Tree, gone: bool) -> list[Ended]:
        """Remember what is there; return the ends of tasks that were not known yet."""
        uid = tree["metadata"]["uid"]
        if tree["kind"] == "TFJob":
            self._gone = self._gone or (gone and uid == self._uid)
            return []
        self._logs.follow(tree)
        found = {(each.uid, each.start): each for each in state.endings(tree)}
        if gone:
            self._pods.pop(uid, None)
            if not found and (uid, state.starts(tree)) not in self._ended:
                lost = state.lost(tree)
                found[uid, lost.start] = lost
        else:
            self._pods[uid] = tree
            self._tell_hindrance(tree)
        new = [each for key, each in found.items() if key not in self._ended]
        self._ended |= found
        self._stages.look(self._pods.values())
        return new

    def _tell_hindrance(self, pod: Tree) -> None:
        why = state.hindrance(pod)
        # Kubernetes counts seconds in the message.
        key = (pod["metadata"]["uid"], why.partition(":")[0])
        if why and key not in self._hindrances:
            self._hindrances.add(key)
            log.warning("%s waits: %s", state.task_of(pod), why)

    def _restart(self, ended: Ended) -> None:
        """Count a task that is started again; raise when that was one too many."""
        went_with_job = ended.taken_away and self._is_over()
        if ended.code == DONE or went_with_job or self._restarts.count(ended):
            return
        self._logs.drain(DRAIN_SECONDS, ended.task)
        report = self._report.of_task(ended, self._logs.tail(ended.task))
        raise UserError(f"cluster.max_restarts ({self._restarts.limit}) are used up: {report}")

    def _is_over(self) -> bool:
        """Say whether the job has ended or is going, so that pods go with it."""
        try:
            job = self._api.get_job(self._name)
        except UnreachableError:
            return False
        except RefusedError as error:
            return error.is_missing
        meta = job["metadata"]
        going = bool(meta.get("deletionTimestamp")) or meta["uid"] != self._uid
        return going or state.is_over(job)

    def _deleted(self) -> str:
        return f"the job {self._name} was deleted by someone else; run the step again to go on"

    def _failed(self, job: Tree) -> str:
        condition = state.condition(job, "Failed") or {}
        said = " ".join(str(condition.get("message", "")).split())
        if condition.get("reason") == "DeadlineExceeded":
            return f"the job {self._name} was active too long: {said}"
        self._look()
        for each in self._ended.values():
            self._logs.drain(DRAIN_SECONDS, each.task)
        bad = [each for each in self._ended.values() if each.code != DONE and not each.taken_away]
        final = [each for each in bad if self._restarts.is_final(each)]
        if final:
            return self._report.of_task(final[0], self._logs.tail(final[0].task))
        last = [self._report.of_task(each, self._logs.tail(each.task)) for each in bad[-1:]]
        words = "; ".join([f"the job {self._name} failed: {said}", *last])
        return f"{words}{self._report.events(self._name)}"

    def _look(self) -> None:
        """Take the pods as they are now."""
        with suppress(RefusedError, UnreachableError):
            for pod in self._api.pods(f"{names.JOB_NAME}={self._name}"):
                self._note({**pod, "kind": "Pod"}, False)

    def _check_deadlines(self) -> None:
        late = self._stages.overdue(self._pods.values())
        if late:
            raise UserError(f"{late} (job {self._name}){self._report.events(self._name)}")
        limit = self._deadlines.unreachable
        if limit and time.monotonic() - self._api.answered_at > limit:
            raise UserError(unreachable(limit, f"the job {self._name} may still run"))
