"""The TFJob of a training run: a pure function from the configuration to a Kubernetes object."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from components.kubernetes import names
from components.kubernetes.engine import with_digest
from components.kubernetes.names import JobKind, Resource, Tree
from components.kubernetes.pods.template import (
    PORT,
    Place,
    labels,
    launcher_variables,
    pod_template,
    replicas,
    without_empty,
)
from trainer.cluster.launcher import Job
from trainer.config.kubernetes import JobConfig
from trainer.config.schema import Config
from trainer.topology import Cluster, Task

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
# The operator's names of the roles, and of the port that it looks for.
REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}
PORT_NAME = "tfjob-port"


def manifest(job: Job, place: Place) -> Tree:
    """Return the TFJob that trains `job`, the same for the same arguments."""
    config = job.config
    settings = config.cluster.kubernetes
    queue = {names.KUEUE: settings.job.queue_name} if settings.job.queue_name else {}
    counts = replicas(config)
    name = names.job_name(config.name, job.checkpoints)
    namespace = settings.namespace or place.namespace
    variables = {**place.variables, **launcher_variables(config, KIND, name, namespace)}
    if sum(counts.values()) == 1:
        # For a job of one task the operator sets no TF_CONFIG.
        (role,) = counts
        alone = Cluster(addresses={role: (f"localhost:{PORT}",)})
        variables["TF_CONFIG"] = alone.tf_config(Task(role=role, index=0))
    place = replace(place, variables=variables)
    tree: Tree = {
        "apiVersion": KIND.resource.api_version,
        "kind": KIND.kind,
        "metadata": {
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "labels": {**settings.job.labels, **queue, **labels(job, "training", LAUNCHER)},
            "annotations": dict(settings.job.annotations),
        },
        "spec": {
            "runPolicy": _run_policy(settings.job, sum(counts.values())),
            "tfReplicaSpecs": {
                REPLICAS[role]: {
                    "replicas": count,
                    "restartPolicy": restart_policy(config, role),
                    "template": pod_template(
                        job, role, place, launcher=LAUNCHER, port_name=PORT_NAME
                    ),
                }
                for role, count in counts.items()
            },
        },
    }
    return with_digest(tree)


def restart_policy(config: Config, role: str) -> str:
    """Return the restart policy of a role, as the operator names it."""
    # Training does not depend on the evaluator: with `ExitCode` its failure would fail the job.
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
        policy["schedulingPolicy"] = without_empty(
            {
                "minAvailable": scheduling.min_available or pods,
                "queue": scheduling.queue,
                "priorityClass": scheduling.priority_class,
                "scheduleTimeoutSeconds": scheduling.timeout_seconds or None,
            }
        )
    if settings.suspend:
        policy["suspend"] = True
    return without_empty(policy)
