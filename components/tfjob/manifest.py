"""The TFJob of a training run: a pure function from the configuration to a dict.

`spec.runPolicy` holds what ends a job; beside it the operator would ignore it silently. Roles are
built apart: a parameter server must not ask for the GPUs of a worker.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from components.pod_defaults import DEFAULTS, PodDefaults
from components.tfjob import names, pods
from components.tfjob.pods import Tree, said
from trainer import lock
from trainer.cluster import Cluster, Task
from trainer.config import Config
from trainer.kubernetes_config import JobConfig
from trainer.launcher import Job
from trainer.topology import topology_of

LAUNCHER = "tfjob"
# The operator's words for the roles.
REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}
KUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job runs, as whom, and with which variables of the step that launches it.

    Attributes:
        namespace: where the settings name none.
        service_account: where the settings name none; empty: the namespace's default.
        variables: endpoints of the object store and the like, for every task; never a secret.
        defaults: the image and the secret where the settings name none.
    """

    namespace: str
    service_account: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    defaults: PodDefaults = DEFAULTS


def manifest(job: Job, place: Place) -> Tree:
    """Return the TFJob that trains `job`, the same for the same arguments.

    The annotation `flotilla/manifest` is the digest of all the rest: a retry knows by it whether
    the job that it finds is its own.
    """
    config = job.config
    settings = config.cluster.kubernetes
    own = {names.RUN: names.run_label(job.run_id), names.MANAGED: LAUNCHER}
    queue = {KUEUE: settings.job.queue_name} if settings.job.queue_name else {}
    counts = replicas(config)
    name = names.job_name(config.name, job.checkpoints)
    namespace = settings.namespace or place.namespace
    place = replace(place, variables={**place.variables, **_heartbeat(config, namespace, name)})
    tree: Tree = {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": "TFJob",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {**settings.job.labels, **queue, **own},
            "annotations": dict(settings.job.annotations),
        },
        "spec": {
            "runPolicy": _run_policy(settings.job, sum(counts.values())),
            "tfReplicaSpecs": {
                REPLICAS[role]: _replica(job, role, count, place, own)
                for role, count in counts.items()
            },
        },
    }
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    tree["metadata"]["annotations"][names.MANIFEST] = digest
    return tree


def replicas(config: Config) -> dict[str, int]:
    """Return how many tasks of each role the job has."""
    cluster = config.cluster
    tasks = topology_of(config.training.strategy).tasks(
        servers=cluster.parameter_servers, workers=cluster.workers
    )
    if cluster.kubernetes.chiefless and "worker" in tasks:
        tasks.pop("chief", None)
    return {**tasks, **({"evaluator": 1} if cluster.evaluator else {})}


def leading(config: Config) -> Task:
    """Return the task whose end is the end of the job."""
    return Task(role="chief" if "chief" in replicas(config) else "worker", index=0)


def _replica(job: Job, role: str, count: int, place: Place, own: Mapping[str, str]) -> Tree:
    topology = topology_of(job.config.training.strategy)
    leads = topology.leads(Task(role=role, index=0)) or leading(job.config).role == role
    uris = ["--dataset", job.dataset, "--checkpoints", job.checkpoints]
    return {
        "replicas": count,
        "restartPolicy": pods.restart_policy(job.config, role),
        "template": pods.template(
            job.config,
            role,
            ["--config", pods.CONFIG_FILE, *uris, "--workdir", "."],
            leads=leads or role == "evaluator",
            labels=own,
            variables={**place.variables, **_alone(job.config, role)},
            service_account=place.service_account,
            defaults=place.defaults,
        ),
    }


def _heartbeat(config: Config, namespace: str, name: str) -> dict[str, str]:
    seconds = config.cluster.kubernetes.deadlines.heartbeat
    place = {"namespace": namespace, "job": name, "seconds": str(seconds)}
    # A chief that begins again, as another pod perhaps, is a life of the same job.
    life = {lock.VARIABLE: f"TFJob {namespace}/{name}"}
    return {pods.LAUNCHER_VARIABLE: json.dumps(place), **life}


def _alone(config: Config, role: str) -> dict[str, str]:
    """Return TF_CONFIG for a job of one task, to which the operator gives none."""
    if sum(replicas(config).values()) > 1:
        return {}
    cluster = Cluster(addresses={role: (f"localhost:{pods.PORT}",)})
    return {"TF_CONFIG": cluster.tf_config(Task(role=role, index=0))}


def _run_policy(settings: JobConfig, pods_in_all: int) -> Tree:
    gang = settings.scheduling
    policy: dict[str, Any] = {
        "cleanPodPolicy": settings.clean_pod_policy,
        "ttlSecondsAfterFinished": settings.ttl_seconds,
        "activeDeadlineSeconds": settings.active_deadline_seconds,
        "backoffLimit": settings.backoff_limit,
    }
    if gang.gang:
        policy["schedulingPolicy"] = said(
            {
                "minAvailable": gang.min_available or pods_in_all,
                "queue": gang.queue,
                "priorityClass": gang.priority_class,
                "scheduleTimeoutSeconds": gang.timeout_seconds or None,
            }
        )
    if settings.suspend:
        policy["suspend"] = True
    return said(policy)
