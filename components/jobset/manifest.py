"""The JobSet of a training run: a pure function from the configuration to a Kubernetes object.

Each task is a replica with one completion: a lost pod comes back at once when its Job is deleted,
where the Job controller would wait up to 10 minutes. Exit codes from 1 to 127 are final; those from
128 on begin a task again. Of JobSet 0.12: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2
"""

from __future__ import annotations

import json
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
    leading,
    pod_template,
    replicas,
    without_empty,
)
from trainer.cluster.launcher import Job
from trainer.config.kubernetes import JobConfig
from trainer.errors import DONE, RETRYABLE

LAUNCHER: Literal["jobset"] = "jobset"
# The labels of JobSet, on the child Jobs and on the pods.
NAME_LABEL, UID_LABEL = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/jobset-uid"
INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
KIND = JobKind(
    resource=Resource("jobsets", "jobset.x-k8s.io", "v1alpha2"),
    kind="JobSet",
    label=NAME_LABEL,
    controller="JobSet controller",
    show=("kubectl get deployments --all-namespaces --selector app.kubernetes.io/name=jobset"),
    remedy=(
        "this cluster does not serve JobSets: JobSet, or its CRD jobsets.jobset.x-k8s.io, is not "
        "installed; flotilla doctor shows how to install it"
    ),
    has_child_jobs=True,
    outdated=(
        "the JobSet of this cluster is too old for this field: install 0.9 or newer, or leave the "
        "setting out that makes it"
    ),
)
PORT_NAME = "grpc"
# Kubernetes counts the failures of a task here. Flotilla counts those of all tasks itself.
BACKOFF_LIMIT = 1000
_INDEX_VARIABLE = "FLOTILLA_TASK_INDEX"


def manifest(job: Job, place: Place) -> Tree:
    """Return the JobSet that trains `job`, the same for the same arguments."""
    config = job.config
    settings = config.cluster.kubernetes
    queue = {names.KUEUE: settings.job.queue_name} if settings.job.queue_name else {}
    name = names.job_name(config.name, job.checkpoints)
    namespace = settings.namespace or place.namespace
    variables = {**place.variables, **launcher_variables(config, KIND, name, namespace)}
    place = replace(place, variables=variables)
    counts = replicas(config)
    leader = leading(config)
    tree: Tree = {
        "apiVersion": KIND.resource.api_version,
        "kind": KIND.kind,
        "metadata": {
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "labels": {**settings.job.labels, **queue, **labels(job, "training", LAUNCHER)},
            "annotations": dict(settings.job.annotations),
        },
        "spec": without_empty(
            {
                "suspend": settings.job.suspend or None,
                "ttlSecondsAfterFinished": settings.job.ttl_seconds,
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [leader.role]},
                "replicatedJobs": [
                    {
                        "name": role,
                        "replicas": count,
                        "template": _job(job, role, name, counts, place),
                    }
                    for role, count in counts.items()
                ],
            }
        ),
    }
    return with_digest(tree)


def _job(job: Job, role: str, name: str, counts: dict[str, int], place: Place) -> Tree:
    settings = job.config.cluster.kubernetes.job
    template = pod_template(job, role, place, launcher=LAUNCHER, port_name=PORT_NAME)
    template["spec"]["restartPolicy"] = "OnFailure" if role == "evaluator" else "Never"
    container = template["spec"]["containers"][0]
    # The variable has to stand before the one that refers to it.
    container["env"] = [*_task_variables(role, name, counts), *container["env"]]
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": _backoff_limit(settings),
            "activeDeadlineSeconds": settings.active_deadline_seconds,
            **({} if role == "evaluator" else {"podFailurePolicy": _failure_policy()}),
            "template": template,
        }
    }


def _task_variables(role: str, name: str, counts: dict[str, int]) -> list[Tree]:
    """Return TF_CONFIG, which Kubernetes completes with the index of the task."""
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}}
    cluster = {
        each: [f"{name}-{each}-{number}-0.{name}:{PORT}" for number in range(count)]
        for each, count in counts.items()
        if each != "evaluator"
    }
    if sum(counts.values()) == 1:
        cluster = {role: [f"localhost:{PORT}"]}
    task = f'{{"type": {json.dumps(role)}, "index": $({_INDEX_VARIABLE})}}'
    text = f'{{"cluster": {json.dumps(cluster)}, "task": {task}}}'
    return [
        {"name": _INDEX_VARIABLE, "valueFrom": index},
        {"name": "TF_CONFIG", "value": text},
    ]


def _backoff_limit(settings: JobConfig) -> int:
    return BACKOFF_LIMIT if settings.backoff_limit is None else settings.backoff_limit


def _failure_policy() -> Tree:
    """Return which ends of a pod are final; that of a lost pod has to stand first."""
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
