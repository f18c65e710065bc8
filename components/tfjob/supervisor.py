"""Watch one job to its end: stages, restarts, logs, and what to say when it fails."""

from __future__ import annotations

import logging
import queue
import time
from contextlib import suppress

from components.tfjob import names, state
from components.tfjob.api import Api, RefusedError, Tree, UnreachableError
from components.tfjob.failure import Reporter
from components.tfjob.logs import Logs
from components.tfjob.manifest import leading
from components.tfjob.patience import refused, unreachable
from components.tfjob.restarts import Restarts
from components.tfjob.stages import Stages
from components.tfjob.state import Ended
from trainer.errors import DONE, RunInterruptedError, UserError
from trainer.launcher import Job

log = logging.getLogger(__name__)
# What is asked of the API, or waited for, again at least so often.
LOOK_SECONDS = 5.0
DRAIN_SECONDS = 10.0

# An object with whether it is gone, what the API will not tell, or None: an end was asked for.
Happening = tuple[Tree, bool] | RefusedError | None
Happenings = queue.SimpleQueue[Happening]


class Supervisor:
    """Takes what happens to a job and its pods, one after the other."""

    def __init__(
        self, job: Job, made: Tree, api: Api, logs: Logs, stages: Stages, happenings: Happenings
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
