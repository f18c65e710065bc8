"""The JobSet engine: builds the JobSet for a configuration and interprets its status.

Each task is its own replica with one completion. The Job controller would wait up to 10 minutes
before it replaces a lost pod. Therefore the engine deletes the replica's Job immediately. Exit
codes from 1 to 127 are final for every task except the evaluator. Codes from 128 restart the task.
Written for JobSet 0.12, see https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.engine import Engine, JobEnd, condition, condition_message
from flotilla.components.kubernetes.names import JOBS, JobKind, Resource, Tree
from flotilla.components.kubernetes.pods import pod_state, program
from flotilla.components.kubernetes.pods.pod_state import TaskEnd
from flotilla.components.kubernetes.pods.template import (
    Place,
    addresses,
    drop_empty,
    leading,
    pod_template,
    replicas,
)
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import DONE, RETRYABLE, ConfigError

LAUNCHER: Literal["jobset"] = "jobset"
# Label that JobSet sets on child Jobs and pods.
UID_LABEL = "jobset.sigs.k8s.io/jobset-uid"
KIND = JobKind(
    resource=Resource("jobsets", "jobset.x-k8s.io", "v1alpha2"),
    kind="JobSet",
    label="jobset.sigs.k8s.io/jobset-name",
    controller="JobSet controller",
    show=("kubectl get deployments --all-namespaces --selector app.kubernetes.io/name=jobset"),
    remedy=(
        "this cluster does not serve JobSets: JobSet, or its CRD jobsets.jobset.x-k8s.io, is not "
        "installed; flotilla doctor shows how to install it"
    ),
    has_child_jobs=True,
    outdated=(
        "the JobSet version of this cluster does not know the field: install 0.9 or later, or "
        "remove the setting that creates the field"
    ),
)
PORT_NAME = "grpc"
# The default `backoffLimit` of each child Job. It is high enough to have no effect:
# Flotilla itself limits the total number of failures of all tasks.
BACKOFF_LIMIT = 1000
INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
# The reason that the Job controller gives if a Job exceeds its active deadline.
_PAST_DEADLINE = "DeadlineExceeded"
# Maximum number of child Jobs whose events are read. Idle Jobs usually fail for the same reason.
_REPORTERS = 10


def _job(job: Job, role: str, name: str, place: Place) -> Tree:
    settings = job.config.cluster.kubernetes.job
    backoff_limit = BACKOFF_LIMIT if settings.backoff_limit is None else settings.backoff_limit
    template = pod_template(job, role, place, launcher=LAUNCHER, port_name=PORT_NAME)
    template["spec"]["restartPolicy"] = "OnFailure" if role == "evaluator" else "Never"
    tasks = addresses(replicas(job.config), lambda each, index: f"{name}-{each}-{index}-0.{name}")
    label = f"metadata.labels['{INDEX_LABEL}']"
    program.set_task(template["spec"], job.config, role, tasks, {program.INDEX_VARIABLE: label})
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": backoff_limit,
            "activeDeadlineSeconds": settings.active_deadline_seconds,
            **({} if role == "evaluator" else {"podFailurePolicy": _failure_policy()}),
            "template": template,
        }
    }


def _failure_policy() -> Tree:
    """Return the pod failure policy. Kubernetes applies the first rule that matches."""
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    final = {
        "containerName": names.CONTAINER,
        "operator": "In",
        "values": list(range(DONE + 1, RETRYABLE)),
    }
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [disrupted]},
            {"action": "FailJob", "onExitCodes": final},
        ]
    }


class JobSets(Engine):
    """The engine for JobSets."""

    name = LAUNCHER
    kind = KIND
    is_strict = True
    fails_with_a_pod = False

    def check(self, config: Config) -> None:
        """Raise a `ConfigError` for settings that JobSet or a user's program does not support."""
        super().check(config)
        settings = config.cluster.kubernetes
        job = settings.job
        if job.scheduling != type(job.scheduling)():
            raise ConfigError(
                "cluster.kubernetes.job.scheduling: not supported with cluster.launcher jobset; "
                "to admit all pods or none, set cluster.kubernetes.job.queue_name to a Kueue queue"
            )
        if job.clean_pod_policy != "Running":
            raise ConfigError(
                "cluster.kubernetes.job.clean_pod_policy: not supported with cluster.launcher "
                "jobset, which deletes only running pods; remove this key"
            )
        for role in replicas(config):
            policy = settings.of(role).restart_policy
            own = "OnFailure" if role == "evaluator" else "ExitCode"
            if policy not in ("", own):
                raise ConfigError(
                    f"cluster.kubernetes.{role}.restart_policy: JobSet does not support "
                    f"'{policy}', only '{own}'; remove this key"
                )

    def spec(self, job: Job, name: str, place: Place) -> Tree:
        """Return the `spec` of the manifest of a job with this name."""
        settings = job.config.cluster.kubernetes.job
        return drop_empty(
            {
                "suspend": settings.suspend or None,
                "ttlSecondsAfterFinished": settings.ttl_seconds,
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "successPolicy": {
                    "operator": "All",
                    "targetReplicatedJobs": [leading(job.config).role],
                },
                "replicatedJobs": [
                    {"name": role, "replicas": count, "template": _job(job, role, name, place)}
                    for role, count in replicas(job.config).items()
                ],
            }
        )

    def templates(self, tree: Tree) -> dict[str, Tree]:
        """Return a job's pod templates, keyed by role."""
        jobs = tree["spec"]["replicatedJobs"]
        return {each["name"]: each["template"]["spec"]["template"] for each in jobs}

    def owns(self, uid: str, pod: Tree) -> bool:
        """Return whether a pod's label contains the uid of this JobSet."""
        return bool(pod["metadata"].get("labels", {}).get(UID_LABEL) == uid)

    def is_taken_up(self, tree: Tree) -> bool:
        """Return whether the controller has written a status."""
        return bool(tree.get("status"))

    def is_suspended(self, tree: Tree) -> bool:
        """Return whether the spec of a job suspends it, even if its pods still run."""
        return bool(tree["spec"].get("suspend"))

    def end(self, tree: Tree) -> JobEnd | None:
        """Return how the job ended, or None if it has not ended."""
        if condition(tree, "Completed"):
            return JobEnd(is_done=True)
        failed = condition(tree, "Failed")
        return JobEnd(is_done=False, message=condition_message(failed)) if failed else None

    def is_failing(self, api: Api, tree: Tree) -> bool:
        """Return whether a child Job is failing.

        Kubernetes sets the condition `FailureTarget` as soon as a Job fails, but `Failed` only
        after all pods of the Job have ended.
        """
        jobs = self._jobs(api, tree)
        return any(condition(job, kind) for job in jobs for kind in ("FailureTarget", "Failed"))

    def failure(self, api: Api, tree: Tree) -> JobEnd:
        """Return how the job ended, and why a child Job failed if one did."""
        end = super().failure(api, tree)
        try:
            jobs = self._jobs(api, tree)
        except (RefusedError, UnreachableError):
            return end
        failed = [found for found in (condition(job, "Failed") for job in jobs) if found]
        if not failed:
            return end
        past = any(each.get("reason") == _PAST_DEADLINE for each in failed)
        message = f"{end.message}: {condition_message(failed[0])}"
        return replace(end, message=message, is_past_deadline=past)

    def is_final(self, _config: Config, end: TaskEnd) -> bool:
        """Return whether the pod failure policy fails the whole job after this exit of a task."""
        if end.task.role == "evaluator" or end.pod_deleted or end.code is None:
            return False
        return DONE < end.code < RETRYABLE

    def may_suspend(self, tree: Tree) -> bool:
        """Return whether a suspension stops the job. Kueue would resume its jobs."""
        return names.KUEUE not in (tree["metadata"].get("labels") or {})

    def bring_back(self, api: Api, pod: Tree, /) -> set[str]:
        """Delete the Job of a lost pod. JobSet recreates the Job immediately, without backoff."""
        owners = pod["metadata"].get("ownerReferences") or []
        jobs = {owner["uid"]: owner["name"] for owner in owners if owner["kind"] == "Job"}
        for uid, name in jobs.items():
            api.delete(JOBS, name, uid)
        return set(jobs)

    def reporters(self, api: Api, tree: Tree) -> Sequence[str]:
        """Return the uids of the JobSet and of up to `_REPORTERS` Jobs without active pods."""
        idle = [job for job in self._jobs(api, tree) if not job.get("status", {}).get("active")]
        jobs = [str(job["metadata"]["uid"]) for job in idle[:_REPORTERS]]
        return [str(tree["metadata"]["uid"]), *jobs]

    def _jobs(self, api: Api, tree: Tree) -> list[Tree]:
        metadata = tree["metadata"]
        jobs = api.list_labelled(JOBS, KIND.selector(metadata["name"]))
        return [job for job in jobs if pod_state.is_owned_by(job, metadata["uid"])]
