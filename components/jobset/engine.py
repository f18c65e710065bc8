"""JobSet (kubernetes-sigs): what its jobs, and their child Jobs, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from components.jobset.manifest import KIND, LAUNCHER, NAME_LABEL, UID_LABEL, manifest
from components.kubernetes import names
from components.kubernetes.api.client import Api, RefusedError, UnreachableError
from components.kubernetes.engine import Engine, JobEnd, condition
from components.kubernetes.names import JOBS, Tree
from components.kubernetes.pods.pod_state import TaskEnd
from components.kubernetes.pods.template import Place, replicas
from components.kubernetes.stop import Stop, SuspendingStop
from trainer.cluster.launcher import Job
from trainer.config.schema import Config
from trainer.errors import DONE, RETRYABLE, ConfigError
from trainer.topology import Task

# The Job controller's reason for a Job that was active for longer than it may.
_PAST_DEADLINE = "DeadlineExceeded"
# Of so many child Jobs without pods the events are read: they say the same.
_REPORTERS = 10


class JobSets(Engine):
    """The jobs of JobSet."""

    name = LAUNCHER
    kind = KIND
    is_strict = True
    fails_with_a_pod = False

    def check(self, config: Config) -> None:
        """Raise a `ConfigError` for a setting of TFJobs that JobSets do not have."""
        settings = config.cluster.kubernetes
        job = settings.job
        if job.scheduling != type(job.scheduling)():
            raise ConfigError(
                "cluster.kubernetes.job.scheduling: not with cluster.launcher jobset; name a queue "
                "of Kueue in cluster.kubernetes.job.queue_name, which admits all pods or none"
            )
        if job.clean_pod_policy != "Running":
            raise ConfigError(
                "cluster.kubernetes.job.clean_pod_policy: not with cluster.launcher jobset, which "
                "deletes the pods that run; leave it out"
            )
        for role in replicas(config):
            policy = settings.of(role).restart_policy
            own = "OnFailure" if role == "evaluator" else "ExitCode"
            if policy not in ("", own):
                raise ConfigError(
                    f"cluster.kubernetes.{role}.restart_policy: {policy} is not one of JobSets, "
                    f"where it is {own}; leave it out"
                )

    def manifest(self, job: Job, place: Place) -> Tree:
        """Return the JobSet of a run."""
        return manifest(job, place)

    def templates(self, tree: Tree) -> Sequence[Tree]:
        """Return the pod templates of a job, role by role."""
        jobs = tree["spec"]["replicatedJobs"]
        return [each["template"]["spec"]["template"] for each in jobs]

    def owns(self, uid: str, pod: Tree) -> bool:
        """Return whether a pod belongs to the JobSet with this uid: its owner is a child Job."""
        return bool(pod["metadata"].get("labels", {}).get(UID_LABEL) == uid)

    def is_taken_up(self, tree: Tree) -> bool:
        """Return whether the controller has written a status."""
        return bool(tree.get("status"))

    def is_suspended(self, tree: Tree) -> bool:
        """Return whether a job is suspended; its condition comes before its pods are gone."""
        return bool(tree["spec"].get("suspend"))

    def end(self, tree: Tree) -> JobEnd | None:
        """Return how a job has ended; None before that."""
        if condition(tree, "Completed"):
            return JobEnd(is_done=True)
        failed = condition(tree, "Failed")
        if failed is None:
            return None
        return JobEnd(is_done=False, message=" ".join(str(failed.get("message", "")).split()))

    def is_failing(self, api: Api, tree: Tree) -> bool:
        """Return whether a child Job fails: its condition comes once its pods have ended."""
        jobs = self._jobs(api, tree)
        return any(condition(job, kind) for job in jobs for kind in ("FailureTarget", "Failed"))

    def failure(self, api: Api, tree: Tree) -> JobEnd:
        """Return how a job has failed, in the words of the child Job that failed it."""
        end = self.end(tree) or JobEnd(is_done=False)
        try:
            jobs = self._jobs(api, tree)
        except (RefusedError, UnreachableError):
            return end
        failed = [found for found in (condition(job, "Failed") for job in jobs) if found]
        if not failed:
            return end
        message = " ".join(str(failed[0].get("message", "")).split())
        past = any(each.get("reason") == _PAST_DEADLINE for each in failed)
        return replace(end, message=f"{end.message}: {message}", is_past_deadline=past)

    def is_final(self, _config: Config, end: TaskEnd) -> bool:
        """Return whether the pod failure policy fails the job for this end of a task."""
        if end.task.role == "evaluator" or end.pod_deleted or end.code is None:
            return False
        return DONE < end.code < RETRYABLE

    def stop(self, tree: Tree) -> Stop:
        """Return the stop by suspension; by the guard where Kueue would resume the job at once."""
        jobs = {each["name"]: each["template"]["spec"] for each in tree["spec"]["replicatedJobs"]}
        role = "chief" if "chief" in jobs else "worker"
        template = jobs.get(role, {}).get("template", {})
        is_queued = names.KUEUE in (tree["metadata"].get("labels") or {})
        kind_of_stop = Stop if is_queued else SuspendingStop
        return kind_of_stop(KIND, tree, Task(role=role, index=0), template)

    def bring_back(self, api: Api, pod: Tree) -> None:
        """Delete the Job of a lost pod: JobSet makes it again at once, without a back-off."""
        for owner in pod["metadata"].get("ownerReferences") or []:
            if owner["kind"] == "Job":
                api.delete(JOBS, owner["name"], owner["uid"])

    def reporters(self, api: Api, tree: Tree) -> Sequence[str]:
        """Return the uids of the job and of child Jobs without a pod, which report the reason."""
        idle = [job for job in self._jobs(api, tree) if not job.get("status", {}).get("active")]
        jobs = [str(job["metadata"]["uid"]) for job in idle[:_REPORTERS]]
        return [str(tree["metadata"]["uid"]), *jobs]

    def _jobs(self, api: Api, tree: Tree) -> list[Tree]:
        metadata = tree["metadata"]
        jobs = api.labelled(JOBS, f"{NAME_LABEL}={metadata['name']}")
        own = metadata["uid"]
        return [
            job
            for job in jobs
            if own in [each["uid"] for each in job["metadata"].get("ownerReferences") or []]
        ]
