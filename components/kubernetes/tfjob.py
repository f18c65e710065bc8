"""The TFJob engine: builds the TFJob of a configuration and interprets its status.

The training operator (1.9) fails a job if one of its pods is deleted, evicted or preempted. It also
deletes the Services of a suspended job, so a last checkpoint that needs a new connection would
fail. Therefore the launcher requests a stop through the job's lease and does not set `suspend`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from flotilla.components.kubernetes.engine import Engine, JobEnd, condition, condition_message
from flotilla.components.kubernetes.names import JobKind, Resource, Tree
from flotilla.components.kubernetes.pods import pod_state, program
from flotilla.components.kubernetes.pods.pod_state import TaskEnd
from flotilla.components.kubernetes.pods.template import (
    PORT,
    Place,
    addresses,
    drop_empty,
    pod_template,
    replicas,
)
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import JobConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.errors import RETRYABLE

LAUNCHER: Literal["tfjob"] = "tfjob"
KIND = JobKind(
    resource=Resource("tfjobs", "kubeflow.org"),
    kind="TFJob",
    label="training.kubeflow.org/job-name",
    controller="training operator",
    show=(
        "kubectl get deployments --all-namespaces --selector "
        "control-plane=kubeflow-training-operator"
    ),
    remedy=(
        "this cluster does not serve TFJobs: the training operator, or its CRD "
        "tfjobs.kubeflow.org, is not installed; flotilla doctor shows how to install it"
    ),
)
# The operator's names of the roles, and the port name that it expects.
REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}
PORT_NAME = "tfjob-port"
INDEX_LABEL = "training.kubeflow.org/replica-index"
# Variable with the pod's namespace, which is part of the task addresses of a user's program.
_NAMESPACE = "FLOTILLA_NAMESPACE"
# Recognize this failure by its message, because the operator gives the same reason for every one.
_PAST_DEADLINE = "active longer than specified deadline"


def _template(job: Job, role: str, name: str, counts: dict[str, int], place: Place) -> Tree:
    template = pod_template(job, role, place, launcher=LAUNCHER, port_name=PORT_NAME)
    if not job.config.program.command:
        # The operator sets TF_CONFIG in the container named `tensorflow`.
        return template
    fields = {
        program.INDEX_VARIABLE: f"metadata.labels['{INDEX_LABEL}']",
        _NAMESPACE: "metadata.namespace",
    }
    program.set_task(
        template["spec"],
        job.config,
        role,
        addresses(counts, lambda each, index: f"{name}-{each}-{index}.$({_NAMESPACE}).svc"),
        fields,
        has_tf_config=sum(counts.values()) > 1,
    )
    return template


def restart_policy(config: Config, role: str) -> str:
    """Return the operator's restart policy for a role."""
    # With `ExitCode`, a failed evaluator would fail the job, although training does not need it.
    default = "OnFailure" if role == "evaluator" else "ExitCode"
    return config.cluster.kubernetes.of(role).restart_policy or default


def _run_policy(settings: JobConfig, pods: int) -> Tree:
    scheduling = settings.scheduling
    policy: Tree = {
        "cleanPodPolicy": settings.clean_pod_policy,
        "ttlSecondsAfterFinished": settings.ttl_seconds,
        "activeDeadlineSeconds": settings.active_deadline_seconds,
        "backoffLimit": settings.backoff_limit,
    }
    if scheduling.gang:
        policy["schedulingPolicy"] = drop_empty(
            {
                "minAvailable": scheduling.min_available or pods,
                "queue": scheduling.queue,
                "priorityClass": scheduling.priority_class,
                "scheduleTimeoutSeconds": scheduling.timeout_seconds or None,
            }
        )
    if settings.suspend:
        policy["suspend"] = True
    return drop_empty(policy)


class TFJobs(Engine):
    """The engine for TFJobs."""

    name = LAUNCHER
    kind = KIND
    # The operator's CRD lacks some of Kubernetes' pod fields, which strict validation would refuse.
    is_strict = False
    fails_with_a_pod = True

    def spec(self, job: Job, name: str, place: Place) -> Tree:
        """Return the `spec` of the manifest of a job with this name."""
        config = job.config
        counts = replicas(config)
        if sum(counts.values()) == 1 and not config.program.command:
            # Set TF_CONFIG here, because the operator does not set it for a job with one task.
            (role,) = counts
            alone = Cluster(addresses={role: (f"localhost:{PORT}",)})
            tf_config = {"TF_CONFIG": alone.tf_config(Task(role=role, index=0))}
            place = replace(place, variables={**place.variables, **tf_config})
        return {
            "runPolicy": _run_policy(config.cluster.kubernetes.job, sum(counts.values())),
            "tfReplicaSpecs": {
                REPLICAS[role]: {
                    "replicas": count,
                    "restartPolicy": restart_policy(config, role),
                    "template": _template(job, role, name, counts, place),
                }
                for role, count in counts.items()
            },
        }

    def templates(self, tree: Tree) -> dict[str, Tree]:
        """Return a job's pod templates, keyed by role."""
        roles = tree["spec"]["tfReplicaSpecs"].items()
        return {role.lower(): each["template"] for role, each in roles}

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
        """Return how the job ended, or None if it has not ended."""
        if condition(tree, "Succeeded"):
            return JobEnd(is_done=True)
        failed = condition(tree, "Failed")
        if failed is None:
            return None
        message = condition_message(failed)
        counts = tree.get("status", {}).get("replicaStatuses") or {}
        roles = (str(role).lower() for role, each in counts.items() if (each or {}).get("failed"))
        past = _PAST_DEADLINE in message
        return JobEnd(is_done=False, message=message, is_past_deadline=past, roles=frozenset(roles))

    def is_final(self, config: Config, end: TaskEnd) -> bool:
        """Return whether this exit is final because the role's restart policy does not cover it."""
        policy = restart_policy(config, end.task.role)
        if policy == "ExitCode":
            return end.code is not None and end.code < RETRYABLE
        return policy == "Never"
