"""The part of the JobSet v0.12.0 controller that a launcher can observe.

The controller creates the headless Service and a Job for each replica, ends the JobSet according to
its success and failure policies, suspends and resumes it, and applies the TTL. The implementation
follows `pkg/controllers` of that version; conditions, names, labels and the order of events were
observed on a real cluster. Startup order, `dependsOn`, coordinator, volume claims, failure policy
rules and feature gates are not implemented.
"""

import copy
import hashlib
from contextlib import suppress

from tests.kubernetes import events, job_controller, job_validation
from tests.kubernetes.conditions import is_true, put, seconds_since
from tests.kubernetes.reconciler import Reconciler
from tests.kubernetes.store import RefusedError, Tree, now

PREFIX = "jobset.sigs.k8s.io/"
NAME, ROLE, JOB_INDEX = f"{PREFIX}jobset-name", f"{PREFIX}replicatedjob-name", f"{PREFIX}job-index"
UID, RESTARTS = f"{PREFIX}jobset-uid", f"{PREFIX}restart-attempt"
FAILED = "jobset failed due to one or more job failures"
TOO_MANY = "jobset failed due to reaching max number of restarts"
RESTARTING = "applying RestartJobSet failure policy action"


class JobSetController(Reconciler):
    """Reconciles the Service, the Jobs and the status of all JobSets."""

    def reconcile(self) -> None:
        for jobset in self._store.all("jobsets"):
            if jobset["metadata"].get("deletionTimestamp") or jobset["spec"].get("managedBy"):
                continue
            before = copy.deepcopy(jobset.get("status"))
            with suppress(RefusedError):
                self._reconcile(jobset)
                if jobset.get("status") != before:
                    self._write(jobset)

    def _write(self, jobset: Tree) -> None:
        meta, status = jobset["metadata"], jobset["status"]
        self._store.change(
            "jobsets", meta["namespace"], meta["name"], lambda tree: tree.update(status=status)
        )

    def _reconcile(self, jobset: Tree) -> None:
        status = jobset.setdefault("status", {})
        owned = self._jobs(jobset)
        restarts = status.get("restarts", 0)
        previous = [j for j in owned if int(j["metadata"]["labels"][RESTARTS]) < restarts]
        jobs = [j for j in owned if j not in previous]
        active = [job for job in jobs if not job_controller.is_finished(job)]
        failed = [job for job in jobs if is_true(job, "Failed")]
        succeeded = [job for job in jobs if is_true(job, "Complete")]
        status["replicatedJobsStatus"] = counted(jobset, active, succeeded, failed)
        if is_finished(jobset):
            self._delete(active)
            self._expire(jobset)
            return
        self._delete(previous)
        suspended = bool(jobset["spec"].get("suspend"))
        if not suspended and is_ready(jobset):
            self._put(jobset, "Restarting", "False", "JobsReady", "all jobs are ready")
        if failed:
            self._fail(jobset, failed)
        elif succeeded and is_successful(jobset, succeeded):
            words = "AllJobsCompleted", "jobset completed successfully"
            self._put(jobset, "Completed", "True", *words)
            status["terminalState"] = "Completed"
        else:
            self._serve(jobset)
            self._create(jobset, {job["metadata"]["name"] for job in owned})
            self._suspend(jobset, active, suspended)

    def _jobs(self, jobset: Tree) -> list[Tree]:
        uid = jobset["metadata"]["uid"]
        found = self._store.all("jobs", jobset["metadata"]["namespace"])
        return [
            j for j in found if (j["metadata"].get("ownerReferences") or [{}])[0].get("uid") == uid
        ]

    def _put(self, jobset: Tree, kind: str, status: str, reason: str, message: str) -> None:
        """Set a condition, and write an event with the same reason and message."""
        if put(jobset, kind, status, reason, message):
            is_bad = status == "True" and kind in ("Failed", "Restarting")
            self._event(jobset, reason, message, "Warning" if is_bad else "Normal")

    def _event(self, jobset: Tree, reason: str, message: str, event: str = "Warning") -> None:
        at = {"eventTime": now().replace("Z", ".000000Z"), "lastTimestamp": None}
        events.write(self._store, jobset, reason, message, type=event, action="Reconciling", **at)

    def _delete(self, jobs: list[Tree]) -> None:
        """Delete Jobs in the foreground: each Job exists until its pods are deleted."""
        for job in jobs:
            meta = job["metadata"]
            if not meta.get("deletionTimestamp"):
                self._store.delete_as(
                    "Foreground", "jobs", meta["namespace"], meta["name"], meta["uid"]
                )

    def _expire(self, jobset: Tree) -> None:
        limit, meta = jobset["spec"].get("ttlSecondsAfterFinished"), jobset["metadata"]
        ended = [
            each["lastTransitionTime"]
            for each in jobset["status"]["conditions"]
            if each["type"] in ("Completed", "Failed") and each["status"] == "True"
        ]
        if limit is not None and seconds_since(ended[0]) >= limit:
            self._store.delete("jobsets", meta["namespace"], meta["name"], meta["uid"])

    def _fail(self, jobset: Tree, failed: list[Tree]) -> None:
        """Fail or restart the JobSet, according to its failure policy."""
        policy, status = jobset["spec"].get("failurePolicy"), jobset["status"]
        first = min(failed, key=failed_at)["metadata"]["name"]
        named = f"(first failed job: {first})"
        if policy is not None and status.get("restartsCountTowardsMax", 0) < policy.get(
            "maxRestarts", 0
        ):
            status["restarts"] = status.get("restarts", 0) + 1
            status["restartsCountTowardsMax"] = status.get("restartsCountTowardsMax", 0) + 1
            words = f"{RESTARTING} {named}"
            self._put(jobset, "Restarting", "True", "DefaultFailurePolicy", words)
            return
        reason, words = (
            ("FailedJobs", FAILED) if policy is None else ("ReachedMaxRestarts", TOO_MANY)
        )
        self._put(jobset, "Failed", "True", reason, f"{words} {named}")
        self._put(jobset, "Restarting", "False", "JobSetFailed", "jobset failed")
        status["terminalState"] = "Failed"

    def _serve(self, jobset: Tree) -> None:
        """Create the headless Service, or use any existing Service of that name."""
        network, meta = jobset["spec"]["network"], jobset["metadata"]
        name = network.get("subdomain") or meta["name"]
        if not network["enableDNSHostnames"]:
            return
        services = self._store.all("services", meta["namespace"], fields=f"metadata.name={name}")
        if services:
            return
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name, "ownerReferences": [owner_of(jobset)]},
            "spec": {
                "clusterIP": "None",
                "selector": {NAME: meta["name"]},
                "publishNotReadyAddresses": network["publishNotReadyAddresses"],
            },
        }
        try:
            self._store.create("services", meta["namespace"], service)
        except RefusedError as error:
            self._event(jobset, "HeadlessServiceCreationFailed", str(error))
            raise

    def _create(self, jobset: Tree, there: set[str]) -> None:
        refused = []
        for role in jobset["spec"]["replicatedJobs"]:
            for index in range(role["replicas"]):
                job = job_of(jobset, role, index)
                name = job["metadata"]["name"]
                if name in there:
                    continue
                try:
                    job_validation.check(job)
                    self._store.create("jobs", jobset["metadata"]["namespace"], job)
                except RefusedError as error:
                    refused.append(f'job "{name}" creation failed with error: {error}')
        if refused:
            self._event(jobset, "JobCreationFailed", "\n".join(refused))
            raise RefusedError(500, "InternalError", refused[0])

    def _suspend(self, jobset: Tree, active: list[Tree], suspended: bool) -> None:
        """Suspend or resume the Jobs; the condition is set before their pods have ended."""
        for job in active:
            meta = job["metadata"]
            if bool(job["spec"].get("suspend")) == suspended:
                continue
            self._store.patch(
                "jobs", meta["namespace"], meta["name"], {"spec": {"suspend": suspended}}
            )
        if suspended:
            self._put(jobset, "Suspended", "True", "SuspendedJobs", "jobset is suspended")
            self._put(jobset, "Restarting", "False", "JobSetSuspended", "jobset is suspended")
        else:
            self._put(jobset, "Suspended", "False", "ResumeJobs", "jobset is resumed")


def is_finished(jobset: Tree) -> bool:
    return is_true(jobset, "Completed") or is_true(jobset, "Failed")


def is_ready(jobset: Tree) -> bool:
    counts = jobset["status"]["replicatedJobsStatus"]
    wanted = sum(role["replicas"] for role in jobset["spec"]["replicatedJobs"])
    return bool(sum(each["ready"] + each["succeeded"] for each in counts) == wanted)


def is_successful(jobset: Tree, succeeded: list[Tree]) -> bool:
    policy = jobset["spec"]["successPolicy"]
    roles = jobset["spec"]["replicatedJobs"]
    targets = policy.get("targetReplicatedJobs") or [role["name"] for role in roles]
    wanted = sum(role["replicas"] for role in roles if role["name"] in targets)
    count = sum(job["metadata"]["labels"][ROLE] in targets for job in succeeded)
    return count >= (1 if policy["operator"] == "Any" else wanted)


def failed_at(job: Tree) -> str:
    found = [each for each in job["status"]["conditions"] if each["type"] == "Failed"]
    return str(found[0]["lastTransitionTime"])


def counted(
    jobset: Tree, active: list[Tree], succeeded: list[Tree], failed: list[Tree]
) -> list[Tree]:
    """Return the numbers of Jobs by role, in the reverse order of roles, as the controller does."""
    found = []
    for role in jobset["spec"]["replicatedJobs"]:
        its = [job for job in active if job["metadata"]["labels"][ROLE] == role["name"]]
        states = [(job["spec"], job.get("status", {})) for job in its]
        ready = [
            status.get("succeeded", 0) + status.get("ready", 0)
            >= min(spec.get("parallelism", 1), spec.get("completions", 1))
            for spec, status in states
        ]
        found.append(
            {
                "name": role["name"],
                "ready": sum(ready),
                "succeeded": sum(j["metadata"]["labels"][ROLE] == role["name"] for j in succeeded),
                "failed": sum(j["metadata"]["labels"][ROLE] == role["name"] for j in failed),
                "active": sum(status.get("active", 0) > 0 for _, status in states),
                "suspended": sum(bool(spec.get("suspend")) for spec, _ in states),
            }
        )
    return sorted(found, key=lambda each: each["name"], reverse=True)


def owner_of(jobset: Tree) -> Tree:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "name": jobset["metadata"]["name"],
        "uid": jobset["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def marks(jobset: Tree, role: Tree, index: int) -> dict[str, str]:
    """Return the labels of a Job and its pods; the same values are set as annotations."""
    meta, roles = jobset["metadata"], jobset["spec"]["replicatedJobs"]
    name = f"{meta['name']}-{role['name']}-{index}"
    before = roles[: roles.index(role)]
    group = role["groupName"]
    same = [each for each in roles if each["groupName"] == group]
    earlier = [each for each in before if each["groupName"] == group]
    values = {
        "jobset-name": meta["name"],
        "jobset-uid": meta["uid"],
        "replicatedjob-name": role["name"],
        "restart-attempt": jobset["status"].get("restarts", 0),
        "replicatedjob-replicas": role["replicas"],
        "global-replicas": sum(each["replicas"] for each in roles),
        "job-index": index,
        "job-key": hashlib.sha1(f"{meta['namespace']}/{name}".encode()).hexdigest(),
        "job-global-index": sum(each["replicas"] for each in before) + index,
        "group-name": group,
        "group-replicas": sum(each["replicas"] for each in same),
        "job-group-index": sum(each["replicas"] for each in earlier) + index,
    }
    return {f"{PREFIX}{key}": str(value) for key, value in values.items()}


def job_of(jobset: Tree, role: Tree, index: int) -> Tree:
    template = copy.deepcopy(role["template"])
    spec, meta = template["spec"], jobset["metadata"]
    labels = marks(jobset, role, index)
    metadata = template.get("metadata") or {}
    network = jobset["spec"]["network"]
    pods = spec["template"].setdefault("metadata", {})
    for tree in (metadata, pods):
        for kind in ("labels", "annotations"):
            tree[kind] = {**tree.get(kind, {}), **labels}
    if network["enableDNSHostnames"]:
        spec["template"]["spec"]["subdomain"] = network.get("subdomain") or meta["name"]
    spec["suspend"] = bool(jobset["spec"].get("suspend"))
    metadata |= {
        "name": f"{meta['name']}-{role['name']}-{index}",
        "ownerReferences": [owner_of(jobset)],
    }
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    return job_validation.defaulted(job)
