"""The Job controller of Kubernetes 1.33: the observable behavior of Jobs and their pods.

A Job has one pod per index; pod names end with a random suffix. A failed pod is kept, and a new pod
with the same index is created after a back-off. The back-off doubles with each failure and is not
reset during the Job's lifetime; failures that a policy ignores also increase it. A finalizer keeps
each pod until its end is counted. With a `podFailurePolicy`, a pod is replaced only after it has
ended, so pods on a dead node are never replaced.

Conditions, events and their order follow `pkg/controller/job`. Per-index limits and success
policies are not implemented.
"""

from __future__ import annotations

import copy
import time
from contextlib import suppress
from dataclasses import dataclass

from tests.kubernetes import events
from tests.kubernetes.conditions import is_true, put, seconds_since
from tests.kubernetes.job_validation import judged
from tests.kubernetes.reconciler import Reconciler
from tests.kubernetes.store import RefusedError, Store, Tree, now

TRACKED = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
ENDED = ("Succeeded", "Failed")
# Maximum length of a pod name's prefix: a name has at most 63 characters, and the random suffix has
# five.
NAME_LENGTH = 58


@dataclass(kw_only=True)
class Backoff:
    """Pod failures and API rejections since a Job was created, which delay its next pod."""

    failures: int = 0
    failed: float = 0.0
    refusals: int = 0
    refused: float = 0.0

    def is_over(self, unit: float, limit: float) -> bool:
        at = time.monotonic()
        # After the API rejects a request, the controller's queue retries after a second, then less
        # often.
        tries = min(limit, unit / 10 * 2 ** (self.refusals - 1)) if self.refusals else 0.0
        return at - self.failed >= self.seconds(unit, limit) and at - self.refused >= tries

    def seconds(self, unit: float, limit: float) -> float:
        return min(limit, unit * 2 ** (self.failures - 1)) if self.failures else 0.0


class JobController(Reconciler):
    """Reconciles the pods and status of all Jobs; the real back-off is 10 to 600 s."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.backoff_seconds = 10.0
        self.longest_seconds = 600.0
        self._backoffs: dict[str, Backoff] = {}

    def reconcile(self) -> None:
        jobs = {job["metadata"]["uid"]: job for job in self._store.all("jobs")}
        for uid in self._backoffs.keys() - jobs.keys():
            del self._backoffs[uid]
        pods: dict[str, list[Tree]] = {}
        for pod in self._store.all("pods") if jobs or self._has_tracked() else []:
            owner = (pod["metadata"].get("ownerReferences") or [{}])[0].get("uid", "")
            if owner in jobs:
                pods.setdefault(owner, []).append(pod)
            elif is_tracked(pod):
                self._release(pod)
        for uid, job in jobs.items():
            with suppress(RefusedError):
                self._reconcile(job, pods.get(uid, []))

    def _has_tracked(self) -> bool:
        return bool(self._store.all("pods", labels="batch.kubernetes.io/job-name"))

    def _reconcile(self, job: Tree, pods: list[Tree]) -> None:
        if job["metadata"].get("deletionTimestamp") or is_finished(job):
            for pod in filter(is_tracked, pods):
                self._release(pod)
            return
        job = copy.deepcopy(job)
        status = job.setdefault("status", {})
        sync = Sync(job, pods)
        backoff = self._backoffs.setdefault(job["metadata"]["uid"], Backoff())
        if sync.new_failed and not sync.new_succeeded:
            backoff.failures += len(sync.new_failed)
            backoff.failed = time.monotonic()
        if not job["spec"].get("suspend"):
            status.setdefault("startTime", now())
        reason, message = sync.failure()
        if reason:
            self._fail(sync, reason, message)
        elif len(sync.succeeded) >= sync.completions and not sync.active and not sync.terminating:
            self._complete(job)
        else:
            self._manage(sync, backoff)
        self._count(sync)

    def _fail(self, sync: Sync, reason: str, message: str) -> None:
        """Delete the running pods; the Job is failed once all of its pods have ended."""
        for pod in sync.active:
            self._delete(sync.job, pod)
        put(sync.job, "FailureTarget", "True", reason, message)
        if not sync.active and not sync.terminating:
            put(sync.job, "Failed", "True", reason, message)
            events.warn(self._store, sync.job, reason, message)

    def _complete(self, job: Tree) -> None:
        words = "CompletionsReached", "Reached expected number of succeeded pods"
        put(job, "SuccessCriteriaMet", "True", *words)
        put(job, "Complete", "True", *words)
        job["status"]["completionTime"] = now()
        events.note(self._store, job, "Completed", "Job completed")

    def _manage(self, sync: Sync, backoff: Backoff) -> None:
        job = sync.job
        if job["spec"].get("suspend"):
            for pod in sync.active:
                # A pod without the finalizer is not counted when it ends, so it is not a failure.
                self._release(pod)
                self._delete(job, pod)
                sync.deleted.append(pod)
            if put(job, "Suspended", "True", "JobSuspended", "Job suspended"):
                events.note(self._store, job, "Suspended", "Job suspended")
            return
        if is_true(job, "Suspended"):
            put(job, "Suspended", "False", "JobResumed", "Job resumed")
            events.note(self._store, job, "Resumed", "Job resumed")
            job["status"]["startTime"] = now()
        if backoff.is_over(self.backoff_seconds, self.longest_seconds):
            self._create_missing(sync, backoff)

    def _create_missing(self, sync: Sync, backoff: Backoff) -> None:
        job = sync.job
        for index in sync.missing():
            try:
                made = self._store.create("pods", job["metadata"]["namespace"], pod_of(job, index))
            except RefusedError as error:
                backoff.refusals += 1
                backoff.refused = time.monotonic()
                events.warn(self._store, job, "FailedCreate", f"Error creating: {error}")
                return
            backoff.refusals = 0
            sync.created.append(made)
            words = f"Created pod: {made['metadata']['name']}"
            events.note(self._store, job, "SuccessfulCreate", words)

    def _count(self, sync: Sync) -> None:
        """Write the status, and remove the finalizers of the pods that the status now counts."""
        job, status = sync.job, sync.job["status"]
        running = [p for p in sync.active if p not in sync.deleted]
        status["active"] = len(running) + len(sync.created)
        status["ready"] = len([p for p in running if p["status"]["phase"] == "Running"])
        status["terminating"] = len(sync.terminating) + len(sync.deleted)
        status["failed"] = sync.failed
        status["succeeded"] = len(sync.succeeded)
        status["completedIndexes"] = ",".join(map(str, sorted(sync.succeeded)))
        meta = job["metadata"]
        self._store.change(
            "jobs", meta["namespace"], meta["name"], lambda tree: tree.update(status=status)
        )
        for pod in [*sync.new_failed, *sync.new_succeeded]:
            self._release(pod)

    def _release(self, pod: Tree) -> None:
        meta = pod["metadata"]
        rest = [each for each in meta.get("finalizers", []) if each != TRACKED]
        with suppress(RefusedError):
            self._store.patch(
                "pods", meta["namespace"], meta["name"], {"metadata": {"finalizers": rest}}
            )

    def _delete(self, job: Tree, pod: Tree) -> None:
        meta = pod["metadata"]
        self._store.delete("pods", meta["namespace"], meta["name"], meta["uid"])
        words = f"Deleted pod: {meta['name']}"
        events.note(self._store, job, "SuccessfulDelete", words)


class Sync:
    """A Job and its pods, grouped by their effect on the Job."""

    def __init__(self, job: Tree, pods: list[Tree]) -> None:
        self.job = job
        spec, status = job["spec"], job["status"]
        self.policy = spec.get("podFailurePolicy")
        replacement = spec.get("podReplacementPolicy")
        self.waits = bool(self.policy) or replacement == "Failed"
        self.completions = int(spec.get("completions", 1))
        running = [p for p in pods if p["status"].get("phase") not in ENDED]
        self.active = [p for p in running if not p["metadata"].get("deletionTimestamp")]
        self.terminating = [p for p in running if p["metadata"].get("deletionTimestamp")]
        tracked = [p for p in pods if is_tracked(p)]
        self.new_failed = [p for p in tracked if self._is_failed(p)]
        self.new_succeeded = [p for p in tracked if p["status"].get("phase") == "Succeeded"]
        counted = [p for p in self.new_failed if judged(self.policy, p)[1]]
        self.failed = status.get("failed", 0) + len(counted)
        before = filter(None, status.get("completedIndexes", "").split(","))
        self.succeeded = {*map(int, before), *map(index_of, self.new_succeeded)}
        self.created: list[Tree] = []
        self.deleted: list[Tree] = []

    def _is_failed(self, pod: Tree) -> bool:
        phase = pod["status"].get("phase")
        # If a terminating pod may be replaced at once, it counts as failed at once.
        is_going = bool(pod["metadata"].get("deletionTimestamp")) and phase != "Succeeded"
        return phase == "Failed" or (is_going and not self.waits)

    def failure(self) -> tuple[str, str]:
        """Return the reason and message if the Job fails; otherwise empty strings."""
        for each in self.job["status"].get("conditions", []):
            if each["type"] == "FailureTarget":
                return each["reason"], each["message"]
        for pod in self.new_failed:
            message, _ = judged(self.policy, pod)
            if message:
                return "PodFailurePolicy", message
        spec = self.job["spec"]
        if self.failed > spec.get("backoffLimit", 6) or self._crashed():
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        limit = spec.get("activeDeadlineSeconds")
        is_late = seconds_since(self.job["status"].get("startTime")) >= (limit or 10**9)
        if is_late and not spec.get("suspend"):
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        return "", ""

    def _crashed(self) -> bool:
        """Return whether the restarts of containers in their pods have reached `backoffLimit`."""
        spec = self.job["spec"]
        if spec["template"]["spec"].get("restartPolicy") != "OnFailure":
            return False
        states = [p["status"].get("containerStatuses") or [{}] for p in self.active]
        restarts = sum(each[0].get("restartCount", 0) for each in states)
        return bool(restarts >= max(1, spec.get("backoffLimit", 6)))

    def missing(self) -> list[int]:
        held = [*self.active, *(self.terminating if self.waits else [])]
        taken = self.succeeded | {index_of(pod) for pod in held}
        left = [index for index in range(self.completions) if index not in taken]
        room = self.job["spec"].get("parallelism", 1) - len(held)
        return left[: max(0, room)]


def is_tracked(pod: Tree) -> bool:
    """Return whether a pod has the finalizer, which means that its end is not counted yet."""
    return TRACKED in pod["metadata"].get("finalizers", [])


def is_finished(job: Tree) -> bool:
    return is_true(job, "Complete") or is_true(job, "Failed")


def index_of(pod: Tree) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def pod_of(job: Tree, index: int) -> Tree:
    meta = job["metadata"]
    template = copy.deepcopy(job["spec"]["template"])
    spec, metadata = template["spec"], template.get("metadata") or {}
    labels = {
        "batch.kubernetes.io/job-name": meta["name"],
        "batch.kubernetes.io/controller-uid": meta["uid"],
        "job-name": meta["name"],
        "controller-uid": meta["uid"],
        INDEX: str(index),
    }
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": meta["name"],
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    made = {
        "generateName": f"{meta['name']}-{index}"[: NAME_LENGTH - 1] + "-",
        "labels": {**metadata.get("labels", {}), **labels},
        "annotations": {**metadata.get("annotations", {}), INDEX: str(index)},
        "finalizers": [TRACKED],
        "ownerReferences": [owner],
    }
    source = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
    for container in spec["containers"]:
        variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}
        container.setdefault("env", []).append(variable)
    spec["hostname"] = f"{meta['name']}-{index}"
    return {"metadata": made, "spec": spec, "status": {"phase": "Pending"}}
