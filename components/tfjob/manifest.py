"""The TFJob of a training run: a pure function from the configuration to a dict.

`spec.runPolicy` holds what ends a job; beside it the operator would ignore it silently. Roles are
built apart: a parameter server must not ask for the GPUs of a worker.

The pod template of one role: pure, from the settings to a dict.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.image import DEFAULTS, SECRET_KEYS, PodDefaults
from components.tfjob import names
from trainer import storage
from trainer.cluster import lease, termination
from trainer.cluster.launcher import Job
from trainer.cluster.process import gpu_count
from trainer.config.kubernetes import SCRATCH, SHARED_MEMORY, WORKING_FOLDER, JobConfig, PodConfig
from trainer.config.schema import Config
from trainer.topology import Cluster, Task, topology_of

# The name by which the operator finds the container, and the port that it looks for.
CONTAINER, PORT_NAME, PORT = "tensorflow", "tfjob-port", 2222
CONFIG_VARIABLE = "FLOTILLA_CONFIG"
# Which job the guard reads the heartbeat of, and for how long it may stand still.
LAUNCHER_VARIABLE = "FLOTILLA_LAUNCHER"
CONFIG_FILE = "config.json"
# A chief that has to end publishes a last checkpoint first.
GRACE_SECONDS = 120
_BEHIND_A_SECRET = ("minio://", "s3://")
_ISTIO = {"sidecar.istio.io/inject": "false"}
# TensorFlow imports Keras 3 at once unless it is told of Keras 2, which a server never imports.
_SERVER = {"TF_USE_LEGACY_KERAS": "1"}

Tree = dict[str, Any]


def template(
    config: Config,
    role: str,
    task: list[str],
    *,
    leads: bool,
    labels: Mapping[str, str],
    variables: Mapping[str, str],
    service_account: str,
    defaults: PodDefaults,
) -> Tree:
    """Return the template of a role's pods.

    Args:
        config: the run configuration.
        role: `chief`, `ps`, `worker` or `evaluator`.
        task: arguments of the task, as Kubernetes should hand them over.
        leads: whether a task of this role runs the outer loop.
        labels: Flotilla's own.
        variables: of the launching step, which every task needs as well.
        service_account: where the settings name none.
        defaults: the image and the secret where the settings name none.
    """
    pod = _with_defaults(config.cluster.kubernetes.of(role), task, defaults)
    spec: Tree = {
        "containers": [_container(config, role, pod, task, leads=leads, variables=variables)],
        "volumes": _volumes(pod),
        "terminationGracePeriodSeconds": pod.grace_seconds or GRACE_SECONDS,
        "serviceAccountName": pod.service_account or service_account,
        "priorityClassName": pod.priority_class,
        "schedulerName": pod.scheduler,
        "nodeSelector": pod.node_selector,
        "tolerations": list(pod.tolerations),
        "affinity": pod.affinity,
        "imagePullSecrets": [{"name": name} for name in pod.image_pull_secrets],
    }
    metadata = {
        "labels": {**_ISTIO, **pod.labels, **labels},
        "annotations": {**_ISTIO, **pod.annotations},
    }
    return {"metadata": metadata, "spec": said(spec)}


def _with_defaults(pod: PodConfig, task: list[str], defaults: PodDefaults) -> PodConfig:
    """Return the settings with the run's image, and with its secret where its store needs one."""
    update: dict[str, Any] = {} if pod.image else {"image": defaults.image}
    said_otherwise = pod.env_from_secrets or set(SECRET_KEYS) & {*pod.env, *pod.secret_env}
    if not said_otherwise and any(word.startswith(_BEHIND_A_SECRET) for word in task):
        update["secret_env"] = {**defaults.secret_env(), **pod.secret_env}
    return pod.model_copy(update=update)


def _text(config: Config) -> str:
    """Return the configuration as JSON, without defaults where only the launcher reads it."""
    tree = config.model_dump(mode="json")
    tree["cluster"]["kubernetes"] = config.cluster.kubernetes.model_dump(
        mode="json", exclude_defaults=True
    )
    return json.dumps(tree)


def restart_policy(config: Config, role: str) -> str:
    """Return which ends of a role's tasks the operator, or the kubelet, makes good."""
    # Training never notices the evaluator: under `ExitCode` its failure would be the job's.
    usual = "OnFailure" if role == "evaluator" else "ExitCode"
    return config.cluster.kubernetes.of(role).restart_policy or usual


def said(tree: Mapping[str, Any]) -> Tree:
    """Return a mapping without the keys of which nothing is said."""
    return {key: value for key, value in tree.items() if value not in ("", {}, [], None)}


def literal(text: str) -> str:
    """Return a text so that Kubernetes hands it over as it is: `$(NAME)` would be replaced."""
    return text.replace("$", "$$")


def _container(
    config: Config,
    role: str,
    pod: PodConfig,
    task: list[str],
    *,
    leads: bool,
    variables: Mapping[str, str],
) -> Tree:
    folder = pod.working_folder or WORKING_FOLDER
    command = list(pod.command) or ["python", "-m", "trainer", "task"]
    guard = ["python", "-m", "components.tfjob.guard", "--"]
    resources = _resources(config, role, pod)
    given = int(resources.get("limits", {}).get(config.cluster.kubernetes.gpu_resource, 0))
    own = {
        CONFIG_VARIABLE: _text(config),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # A dead peer is an error at once and not after gRPC's own patience.
        "GRPC_FAIL_FAST": "use_caller",
        # An image for GPUs shows a pod without one all GPUs of its node.
        **({} if given else {"CUDA_VISIBLE_DEVICES": "-1"}),
        **({} if leads else _SERVER),
    }
    return said(
        {
            "name": CONTAINER,
            "image": pod.image,
            "imagePullPolicy": pod.image_pull_policy,
            "command": [*guard, *(literal(word) for word in command)],
            "args": [literal(word) for word in task],
            "workingDir": folder,
            "env": _pod_environment(pod, {**variables, **own, **pod.env}),
            "envFrom": [
                *({"secretRef": {"name": n, "optional": True}} for n in pod.env_from_secrets),
                *(
                    {"configMapRef": {"name": n, "optional": True}}
                    for n in pod.env_from_config_maps
                ),
            ],
            "ports": [{"name": PORT_NAME, "containerPort": PORT}],
            "resources": resources,
            "volumeMounts": _mounts(pod, folder),
            # The line with which a task ends reaches the launcher even where its log is lost.
            "terminationMessagePath": f"{folder}/{termination.FILE}",
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def _pod_environment(pod: PodConfig, variables: Mapping[str, str]) -> list[Tree]:
    plain = [
        {"name": name, "value": literal(value)}
        for name, value in variables.items()
        if name not in pod.secret_env
    ]
    secret = []
    for variable, place in pod.secret_env.items():
        name, _, key = place.partition("/")
        # Where a secret is absent the storage says which variable it misses; a pod that cannot
        # start says nothing.
        reference = {"secretKeyRef": {"name": name, "key": key, "optional": True}}
        secret.append({"name": variable, "valueFrom": reference})
    return [*plain, *secret]


def _resources(config: Config, role: str, pod: PodConfig) -> Tree:
    gpu = config.cluster.kubernetes.gpu_resource
    count = gpu_count(config, Task(role=role, index=0))
    limits = {**({gpu: str(count)} if count else {}), **pod.resources.limits}
    return said({"requests": dict(pod.resources.requests), "limits": limits})


def _volumes(pod: PodConfig) -> list[Tree]:
    scratch = {"sizeLimit": pod.scratch} if pod.scratch else {}
    memory = {"medium": "Memory", "sizeLimit": pod.shared_memory}
    return [
        {"name": SCRATCH, "emptyDir": scratch},
        *([{"name": SHARED_MEMORY, "emptyDir": memory}] if pod.shared_memory else []),
        *({"name": volume.name, **volume.source} for volume in pod.volumes),
    ]


def _mounts(pod: PodConfig, folder: str) -> list[Tree]:
    return [
        {"name": SCRATCH, "mountPath": folder},
        *([{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}] if pod.shared_memory else []),
        *(
            {"name": each.name, "mountPath": each.mount_path, "readOnly": each.read_only}
            for each in pod.volumes
        ),
    ]


LAUNCHER = "tfjob"
# The operator's words for the roles.
REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}
KUEUE = "kueue.x-k8s.io/queue-name"
# What only a run knows stands in the document as words.
_RUN_ID, _DATASET, _ROOT, _NAMESPACE = "RUN-ID", "DATASET", "gs://BUCKET", "NAMESPACE"


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
    place = replace(
        place, variables={**place.variables, **_heartbeat_variables(config, namespace, name)}
    )
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


def document(config: Config, defaults: PodDefaults = DEFAULTS) -> dict[str, Any]:
    """Return the TFJob of `config`, with placeholders for what only a run knows.

    `defaults` is what a run gives to pods of which the configuration says nothing.
    """
    root = config.storage.root or _ROOT
    job = Job(
        config=config,
        dataset=storage.join(root, "datasets", _DATASET),
        checkpoints=storage.join(root, _RUN_ID, "checkpoints"),
        workdir=Path(),
    )
    return manifest(job, Place(namespace=_NAMESPACE, defaults=defaults))


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
        "restartPolicy": restart_policy(job.config, role),
        "template": template(
            job.config,
            role,
            ["--config", CONFIG_FILE, *uris, "--workdir", "."],
            leads=leads or role == "evaluator",
            labels=own,
            variables={**place.variables, **_alone(job.config, role)},
            service_account=place.service_account,
            defaults=place.defaults,
        ),
    }


def _heartbeat_variables(config: Config, namespace: str, name: str) -> dict[str, str]:
    seconds = config.cluster.kubernetes.deadlines.heartbeat
    place = {"namespace": namespace, "job": name, "seconds": str(seconds)}
    # A chief that begins again, as another pod perhaps, is a life of the same job.
    life = {lease.VARIABLE: f"TFJob {namespace}/{name}"}
    return {LAUNCHER_VARIABLE: json.dumps(place), **life}


def _alone(config: Config, role: str) -> dict[str, str]:
    """Return TF_CONFIG for a job of one task, to which the operator gives none."""
    if sum(replicas(config).values()) > 1:
        return {}
    cluster = Cluster(addresses={role: (f"localhost:{PORT}",)})
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
