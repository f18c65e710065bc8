"""The TFJob of a training run: a pure function from the configuration to a Kubernetes object.

What ends a job is in `spec.runPolicy`: outside of it the operator ignores it silently. Every role
has a pod template of its own, since a parameter server must not request the GPUs of a worker.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.image import DEFAULTS, SECRET_KEYS, PodDefaults
from components.kubernetes import names
from components.kubernetes.names import Tree
from trainer import storage
from trainer.cluster import lease, termination
from trainer.cluster.launcher import Job
from trainer.cluster.process import gpu_count
from trainer.config.kubernetes import (
    SCRATCH,
    SHARED_MEMORY,
    TEMPORARY,
    WORKING_FOLDER,
    JobConfig,
    PodConfig,
)
from trainer.config.schema import Config
from trainer.storage.uri import speaks_s3
from trainer.topology import Cluster, Task, topology_of

LAUNCHER = "tfjob"
# The operator's names of the roles, and of the port that it looks for.
REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}
PORT_NAME, PORT = "tfjob-port", 2222
KUEUE = "kueue.x-k8s.io/queue-name"
# The configuration travels in a variable, which the guard writes to a file.
CONFIG_VARIABLE, CONFIG_FILE = "FLOTILLA_CONFIG", "config.json"
# The job whose heartbeat the guard watches, and after how many seconds it is an orphan.
LAUNCHER_VARIABLE = "FLOTILLA_LAUNCHER"
# The default grace period: a chief publishes a last checkpoint in it.
GRACE_SECONDS = 120
# Python, TensorFlow and KFP write here whatever the working folder is.
TEMPORARY_FOLDER = "/tmp"
# Placeholders of a document without a run.
_RUN_ID, _DATASET, _ROOT = "RUN-ID", "DATASET", "gs://BUCKET"
_NO_SIDECAR = {"sidecar.istio.io/inject": "false"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job runs, with which service account, and with which variables of its launcher.

    Attributes:
        namespace: where the settings name none; empty: that of who creates the job.
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

    The annotation `flotilla/manifest` is the digest of everything else: by it a retry recognizes
    the job that it may adopt.
    """
    config = job.config
    settings = config.cluster.kubernetes
    queue = {KUEUE: settings.job.queue_name} if settings.job.queue_name else {}
    counts = replicas(config)
    name = names.job_name(config.name, job.checkpoints)
    namespace = settings.namespace or place.namespace
    watched = {"namespace": namespace, "job": name, "seconds": str(settings.deadlines.heartbeat)}
    variables = {
        **place.variables,
        LAUNCHER_VARIABLE: json.dumps(watched),
        # A chief that is restarted, perhaps in another pod, is another attempt of the same job.
        lease.VARIABLE: f"TFJob {'/'.join(filter(None, [namespace, name]))}",
    }
    place = replace(place, variables=variables)
    tree: Tree = {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": "TFJob",
        "metadata": {
            "name": name,
            **({"namespace": namespace} if namespace else {}),
            "labels": {**settings.job.labels, **queue, **_labels(job, "training")},
            "annotations": dict(settings.job.annotations),
        },
        "spec": {
            "runPolicy": _run_policy(settings.job, sum(counts.values())),
            "tfReplicaSpecs": {
                REPLICAS[role]: {
                    "replicas": count,
                    "restartPolicy": restart_policy(config, role),
                    "template": _pod_template(job, role, place),
                }
                for role, count in counts.items()
            },
        },
    }
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    tree["metadata"]["annotations"][names.MANIFEST] = digest
    return tree


def isolated(job: Tree) -> Tree:
    """Return a TFJob whose pods only a network policy of their own admits to.

    Its digest stays the same: a launcher that may make policies adopts the job of one that may not.
    """
    job = copy.deepcopy(job)
    for replica in job["spec"]["tfReplicaSpecs"].values():
        replica["template"]["metadata"]["labels"][names.NETWORK] = "job"
    return job


def network_policy(job: Tree) -> Tree | None:
    """Return the network policy of a job as the API holds it; None for one that is not isolated.

    Only the pods of the job reach each other, on every port: NCCL takes any. It is deleted with the
    job, and named for this job alone: that of an earlier one of its name may still be deleted.
    """
    replicas = job["spec"]["tfReplicaSpecs"].values()
    labels = [each["template"].get("metadata", {}).get("labels") or {} for each in replicas]
    if not all(names.NETWORK in each for each in labels):
        return None
    metadata = job["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": uid}
    pods = {"podSelector": {"matchLabels": {names.JOB_NAME: name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"{name}-{uid[:8]}",
            "labels": {
                key: value
                for key, value in metadata["labels"].items()
                if key.startswith((names.APP, names.RUN, names.MANAGED))
            },
            "ownerReferences": [owner],
        },
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]},
    }


def document(config: Config, defaults: PodDefaults = DEFAULTS) -> Tree:
    """Return the TFJob of `config`, with placeholders for what only a run knows.

    Without a namespace where the configuration names none: that is what `kubectl apply -n` sets.
    `defaults` are the image and the secret of pods for which the configuration names none.
    """
    root = config.storage.root or _ROOT
    job = Job(
        config=config,
        dataset=storage.join(root, "datasets", _DATASET),
        checkpoints=storage.join(root, _RUN_ID, "checkpoints"),
        workdir=Path(),
    )
    return manifest(job, Place(namespace="", defaults=defaults))


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
        policy["schedulingPolicy"] = _without_empty(
            {
                "minAvailable": scheduling.min_available or pods,
                "queue": scheduling.queue,
                "priorityClass": scheduling.priority_class,
                "scheduleTimeoutSeconds": scheduling.timeout_seconds or None,
            }
        )
    if settings.suspend:
        policy["suspend"] = True
    return _without_empty(policy)


def _labels(job: Job, component: str) -> dict[str, str]:
    """Return the labels of Flotilla for the job, or for the pods of a role."""
    run = names.label_value(job.run_id)
    return {names.RUN: run, names.MANAGED: LAUNCHER, **names.app_labels(component, run)}


def _pod_template(job: Job, role: str, place: Place) -> Tree:
    uris = ["--dataset", job.dataset, "--checkpoints", job.checkpoints]
    arguments = ["--config", CONFIG_FILE, *uris, "--workdir", "."]
    pod = _with_defaults(job.config.cluster.kubernetes.of(role), arguments, place.defaults)
    spec: Tree = {
        "containers": [_container(job.config, role, pod, arguments, place.variables)],
        "volumes": _volumes(pod),
        "securityContext": _pod_security(pod),
        "terminationGracePeriodSeconds": pod.grace_seconds or GRACE_SECONDS,
        "serviceAccountName": pod.service_account or place.service_account,
        "priorityClassName": pod.priority_class,
        "schedulerName": pod.scheduler,
        "nodeSelector": pod.node_selector,
        "tolerations": list(pod.tolerations),
        "affinity": pod.affinity,
        "imagePullSecrets": [{"name": name} for name in pod.image_pull_secrets],
    }
    metadata = {
        "labels": {**_NO_SIDECAR, **pod.labels, **_labels(job, role)},
        "annotations": {**_NO_SIDECAR, **pod.annotations},
    }
    return {"metadata": metadata, "spec": _without_empty(spec)}


def _with_defaults(pod: PodConfig, arguments: list[str], defaults: PodDefaults) -> PodConfig:
    """Return the settings with the run's image, and with its secret where its store needs one."""
    update: dict[str, Any] = {} if pod.image else {"image": defaults.image}
    has_secret = pod.env_from_secrets or set(SECRET_KEYS) & {*pod.env, *pod.secret_env}
    if not has_secret and any(map(speaks_s3, arguments)):
        update["secret_env"] = {**defaults.secret_env(), **pod.secret_env}
    return pod.model_copy(update=update)


def _container(
    config: Config, role: str, pod: PodConfig, arguments: list[str], variables: Mapping[str, str]
) -> Tree:
    folder = pod.working_folder or WORKING_FOLDER
    command = list(pod.command) or ["python", "-m", "trainer", "task"]
    guard = ["python", "-m", "components.kubernetes.pods.guard", "--"]
    resources = _resources(config, role, pod)
    own = _task_variables(config, role, resources)
    return _without_empty(
        {
            "name": names.CONTAINER,
            "image": pod.image,
            "imagePullPolicy": pod.image_pull_policy,
            "command": [*guard, *(_escape(word) for word in command)],
            "args": [_escape(word) for word in arguments],
            "workingDir": folder,
            "env": _env(pod, {**variables, **own, **pod.env}),
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
            "securityContext": _container_security(pod),
            # The termination message reaches the launcher even where the log is lost.
            "terminationMessagePath": f"{folder}/{termination.FILE}",
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def _task_variables(config: Config, role: str, resources: Tree) -> dict[str, str]:
    """Return the variables of a role's tasks, apart from those of the launcher and the settings."""
    task, settings, tree = (
        Task(role=role, index=0),
        config.cluster.kubernetes,
        config.model_dump(mode="json"),
    )
    # Without defaults where only the launcher reads it.
    tree["cluster"]["kubernetes"] = settings.model_dump(mode="json", exclude_defaults=True)
    gpus = int(resources.get("limits", {}).get(settings.gpu_resource, 0))
    leads = topology_of(config.training.strategy).leads(task) or task == leading(config)
    # For a job of one task the operator sets no TF_CONFIG.
    is_alone = sum(replicas(config).values()) == 1
    alone = Cluster(addresses={role: (f"localhost:{PORT}",)})
    return {
        **({"TF_CONFIG": alone.tf_config(task)} if is_alone else {}),
        CONFIG_VARIABLE: json.dumps(tree),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # A dead peer is an error at once, without gRPC's own retries.
        "GRPC_FAIL_FAST": "use_caller",
        # In an image for GPUs a pod without one would see all GPUs of its node.
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}),
        # With it TensorFlow does not import Keras 3, which a server never uses.
        **({} if leads or role == "evaluator" else {"TF_USE_LEGACY_KERAS": "1"}),
    }


def _env(pod: PodConfig, variables: Mapping[str, str]) -> list[Tree]:
    plain = [
        {"name": name, "value": _escape(value)}
        for name, value in variables.items()
        if name not in pod.secret_env
    ]
    secret = []
    for variable, place in pod.secret_env.items():
        name, _, key = place.partition("/")
        # Optional: without its secret a pod would not start and write no log. The storage names
        # the variable that is missing.
        reference = {"secretKeyRef": {"name": name, "key": key, "optional": True}}
        secret.append({"name": variable, "valueFrom": reference})
    return [*plain, *secret]


def _resources(config: Config, role: str, pod: PodConfig) -> Tree:
    gpu = config.cluster.kubernetes.gpu_resource
    count = gpu_count(config, Task(role=role, index=0))
    limits = {**({gpu: str(count)} if count else {}), **pod.resources.limits}
    return _without_empty({"requests": dict(pod.resources.requests), "limits": limits})


def _pod_security(pod: PodConfig) -> Tree:
    """Return what the Pod Security Standard `restricted` requires of a pod, and the settings."""
    required = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {**({} if pod.security == "image" else required), **pod.security_context}


def _container_security(pod: PodConfig) -> Tree:
    """Return what it requires of a container, and the read-only root that it does not require."""
    if pod.security == "image":
        return {}
    required = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {**required, "readOnlyRootFilesystem": True} if _has_read_only_root(pod) else required


def _has_read_only_root(pod: PodConfig) -> bool:
    return pod.security in ("", "restricted")


def _needs_temporary(pod: PodConfig) -> bool:
    mounted = {pod.working_folder, *(volume.mount_path.rstrip("/") for volume in pod.volumes)}
    return _has_read_only_root(pod) and TEMPORARY_FOLDER not in mounted


def _volumes(pod: PodConfig) -> list[Tree]:
    scratch = {"sizeLimit": pod.scratch} if pod.scratch else {}
    memory = {"medium": "Memory", "sizeLimit": pod.shared_memory}
    return [
        {"name": SCRATCH, "emptyDir": scratch},
        *([{"name": TEMPORARY, "emptyDir": {}}] if _needs_temporary(pod) else []),
        *([{"name": SHARED_MEMORY, "emptyDir": memory}] if pod.shared_memory else []),
        *({"name": volume.name, **volume.source} for volume in pod.volumes),
    ]


def _mounts(pod: PodConfig, folder: str) -> list[Tree]:
    return [
        {"name": SCRATCH, "mountPath": folder},
        *([{"name": TEMPORARY, "mountPath": TEMPORARY_FOLDER}] if _needs_temporary(pod) else []),
        *([{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}] if pod.shared_memory else []),
        *(
            {"name": each.name, "mountPath": each.mount_path, "readOnly": each.read_only}
            for each in pod.volumes
        ),
    ]


def _escape(text: str) -> str:
    """Return a text that Kubernetes passes on unchanged: it would replace `$(NAME)`."""
    return text.replace("$", "$$")


def _without_empty(tree: Mapping[str, Any]) -> Tree:
    return {key: value for key, value in tree.items() if value not in ("", {}, [], None)}
