"""TFJob, of the training operator 1.9: what its jobs say.

The operator fails a job when a pod of it is deleted, evicted or preempted, and deletes the Services
of a job that is suspended: a last checkpoint that needs a new channel would find nobody. So a job
is asked to end through its lease, and not by `suspend`.
"""

from __future__ import annotations

from collections.abc import Sequence

from components.kubernetes.api.client import Api
from components.kubernetes.engine import Engine, JobEnd, condition
from components.kubernetes.names import Tree
from components.kubernetes.pods import pod_state
from components.kubernetes.pods.pod_state import TaskEnd
from components.kubernetes.pods.template import Place
from components.kubernetes.stop import Stop
from components.tfjob.manifest import KIND, LAUNCHER, manifest, restart_policy
from trainer.cluster.launcher import Job
from trainer.config.schema import Config
from trainer.errors import RETRYABLE
from trainer.topology import Task

# The operator gives every failure the same reason, and says the cause in words.
_PAST_DEADLINE = "active longer than specified deadline"


class TFJobs(Engine):
    """The jobs of the training operator."""

    name = LAUNCHER
    kind = KIND
    # The operator's own CRD lacks fields of pods that Kubernetes has.
    is_strict = False
    fails_with_a_pod = True

    def check(self, config: Config) -> None:
        """Every setting is one of TFJobs."""

    def manifest(self, job: Job, place: Place) -> Tree:
        """Return the TFJob of a run."""
        return manifest(job, place)

    def templates(self, tree: Tree) -> Sequence[Tree]:
        """Return the pod templates of a job, role by role."""
        return [each["template"] for each in tree["spec"]["tfReplicaSpecs"].values()]

    def owns(self, uid: str, pod: Tree) -> bool:
        """Return whether a pod belongs to the job with this uid."""
        return pod_state.is_owned_by(pod, uid)

    def is_taken_up(self, tree: Tree) -> bool:
        """Return whether the operator has written a condition."""
        return bool(tree.get("status", {}).get("conditions"))

    def is_suspended(self, tree: Tree) -> bool:
        """Return whether a job is suspended."""
        return bool(tree["spec"].get("runPolicy", {}).get("suspend"))

    def end(self, tree: Tree) -> JobEnd | None:
        """Return how a job has ended; None before that."""
        if condition(tree, "Succeeded"):
            return JobEnd(is_done=True)
        failed = condition(tree, "Failed")
        if failed is None:
            return None
        message = " ".join(str(failed.get("message", "")).split())
        counts = tree.get("status", {}).get("replicaStatuses") or {}
        roles = (str(role).lower() for role, each in counts.items() if (each or {}).get("failed"))
        past = _PAST_DEADLINE in message
        return JobEnd(is_done=False, message=message, is_past_deadline=past, roles=frozenset(roles))

    def is_failing(self, _api: Api, tree: Tree) -> bool:
        """Return whether a job has failed: the operator says so before it deletes a pod."""
        return self.end(tree) is not None

    def failure(self, _api: Api, tree: Tree) -> JobEnd:
        """Return how a job has failed: its condition says all."""
        return self.end(tree) or JobEnd(is_done=False)

    def is_final(self, config: Config, end: TaskEnd) -> bool:
        """Return whether the restart policy of a role leaves a task that ended so alone."""
        policy = restart_policy(config, end.task.role)
        if policy == "ExitCode":
            return end.code is not None and end.code < RETRYABLE
        return policy == "Never"

    def stop(self, tree: Tree) -> Stop:
        """Return the stop by the guard of the leading task."""
        roles = tree["spec"]["tfReplicaSpecs"]
        role = "Chief" if "Chief" in roles else "Worker"
        template = roles.get(role, {}).get("template", {})
        return Stop(KIND, tree, Task(role=role.lower(), index=0), template)

    def bring_back(self, api: Api, pod: Tree) -> None:
        """The operator replaces a pod by itself."""

    def reporters(self, _api: Api, tree: Tree) -> Sequence[str]:
        """Return the uid of the job, on which the operator reports."""
        return [tree["metadata"]["uid"]]
