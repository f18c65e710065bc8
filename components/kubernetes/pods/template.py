"""The pods of a training job. Each role has a template. For example, servers request no GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flotilla.components.image import DEFAULTS, SECRET_KEYS, PodDefaults
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.names import JobKind, Tree
from flotilla.components.kubernetes.pods import program
from flotilla.trainer import events
from flotilla.trainer.cluster import termination
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.loopback import EVERY_HOST, METRICS_HOST
from flotilla.trainer.cluster.process import gpu_count
from flotilla.trainer.config.cluster import (
    SCRATCH,
    SHARED_MEMORY,
    TEMPORARY,
    WORKING_FOLDER,
    PodConfig,
)
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Task
from flotilla.trainer.storage.uri import speaks_s3

PORT = 2222
# The variable with the configuration, and the file to which the guard writes it.
CONFIG_VARIABLE, CONFIG_FILE = "FLOTILLA_CONFIG", "config.json"
# The variable that tells the guard which lease to watch, and for how many seconds.
LAUNCHER_VARIABLE = "FLOTILLA_LAUNCHER"
# Default grace period in seconds, in which a chief publishes a last checkpoint.
GRACE_SECONDS = 120
# Python and TensorFlow write temporary files here, whatever the working folder is.
TEMPORARY_FOLDER = "/tmp"
_NO_SIDECAR = {"sidecar.istio.io/inject": "false"}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job runs, and the defaults of its settings.

    Attributes:
        namespace: namespace of the job; empty for the creator's namespace.
        service_account: service account of the pods; empty for the namespace's default.
        variables: variables of every task, such as endpoints of the object store; no secrets.
        secrets: variables from secrets, as `SECRET/KEY`.
    """

    namespace: str
    service_account: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    defaults: PodDefaults = DEFAULTS


def replicas(config: Config) -> dict[str, int]:
    """Return the number of tasks for each role of the job."""
    cluster = config.cluster
    tasks = config.topology.tasks(servers=cluster.parameter_servers, workers=cluster.workers)
    if cluster.kubernetes.chiefless and "worker" in tasks:
        tasks.pop("chief", None)
    return {**tasks, **({"evaluator": 1} if config.has_evaluator else {})}


def addresses(counts: Mapping[str, int], host: Callable[[str, int], str]) -> dict[str, list[str]]:
    """Return the addresses of the tasks in each role, given the host name of each task."""
    if sum(counts.values()) == 1:
        return {role: [f"localhost:{PORT}"] for role in counts}
    return {
        role: [f"{host(role, index)}:{PORT}" for index in range(count)]
        for role, count in counts.items()
        if role != "evaluator"
    }


def leading(config: Config) -> Task:
    """Return the leading task. The job ends when this task ends."""
    return Task(role="chief" if "chief" in replicas(config) else "worker", index=0)


def grace_seconds(config: Config, role: str) -> int:
    """Return the grace period of a role's pods in seconds, from SIGTERM to SIGKILL."""
    return config.cluster.kubernetes.of(role).grace_seconds or GRACE_SECONDS


def labels(job: Job, component: str, launcher: str) -> dict[str, str]:
    """Return Flotilla's labels for the job, or for the pods of a role."""
    run = names.label_value(job.run_id)
    return {names.RUN: run, names.MANAGED: launcher, **names.app_labels(component, run)}


def launcher_variables(config: Config, kind: JobKind, name: str, namespace: str) -> dict[str, str]:
    """Return the variables that tell the guard which job it serves and which lease to watch."""
    resource = kind.resource
    watched = {
        "namespace": namespace,
        "job": name,
        "kind": [resource.plural, resource.group, resource.version],
        "seconds": str(config.cluster.kubernetes.deadlines.heartbeat),
    }
    return {
        LAUNCHER_VARIABLE: json.dumps(watched),
        # Events and the checkpoint lease contain this name, so that a chief that restarted in
        # another pod is recognized as part of the same job.
        events.JOB: label_job(kind, name, namespace),
    }


def label_job(kind: JobKind, name: str, namespace: str) -> str:
    """Return the name of a job in the events of its tasks."""
    return f"{kind.kind} {'/'.join(filter(None, [namespace, name]))}"


def pod_template(job: Job, role: str, place: Place, *, launcher: str, port_name: str) -> Tree:
    """Return the pod template of a role. `launcher` and `port_name` come from the engine."""
    uris = ["--dataset", job.dataset, "--checkpoints", job.checkpoints]
    arguments = ["--config", CONFIG_FILE, *uris, "--workdir", "."]
    pod = _add_defaults(job.config.cluster.kubernetes.of(role), arguments, place)
    container = _container(job.config, role, pod, arguments, place.variables, port_name)
    containers: Tree = {"containers": [container]}
    if job.config.program.command:
        containers = program.containers(job, role, container, place.defaults.image)
    spec: Tree = {
        **containers,
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
        "labels": {**_NO_SIDECAR, **pod.labels, **labels(job, role, launcher)},
        "annotations": {**_NO_SIDECAR, **pod.annotations},
    }
    return {"metadata": metadata, "spec": drop_empty(spec)}


def _add_defaults(pod: PodConfig, arguments: list[str], place: Place) -> PodConfig:
    """Return the pod settings with the run's image, and its secret if the store needs one."""
    defaults = place.defaults
    update: dict[str, Any] = {} if pod.image else {"image": defaults.image}
    has_secret = pod.env_from_secrets or set(SECRET_KEYS) & {*pod.env, *pod.secret_env}
    references = {name: key for name, key in place.secrets.items() if name not in pod.env}
    if not has_secret and any(map(speaks_s3, arguments)):
        references |= defaults.secret_env()
    if references:
        update["secret_env"] = {**references, **pod.secret_env}
    return pod.model_copy(update=update)


def _container(
    config: Config,
    role: str,
    pod: PodConfig,
    arguments: list[str],
    variables: Mapping[str, str],
    port_name: str,
) -> Tree:
    folder = pod.working_folder or WORKING_FOLDER
    command = list(pod.command) or ["python", "-m", "flotilla.trainer", "task"]
    guard = ["python", "-m", "flotilla.components.kubernetes.pods.guard", "--"]
    resources = _resources(config, role, pod)
    own = _task_variables(config, role, resources)
    return drop_empty(
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
            "ports": [{"name": port_name, "containerPort": PORT}, *_metrics_port(config, role)],
            "resources": resources,
            "volumeMounts": _mounts(pod, folder),
            "securityContext": _container_security(pod),
            # The termination message reaches the launcher even if the log is lost.
            "terminationMessagePath": f"{folder}/{termination.FILE}",
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def _metrics_port(config: Config, role: str) -> list[Tree]:
    port = config.cluster.metrics_port
    if not port or role != leading(config).role:
        return []
    return [{"name": names.METRICS_PORT, "containerPort": port}]


def _task_variables(config: Config, role: str, resources: Tree) -> dict[str, str]:
    task, settings = Task(role=role, index=0), config.cluster.kubernetes
    tree = config.model_dump(mode="json")
    # Leave out the defaults to shorten the variable. The tasks use little of this section.
    tree["cluster"]["kubernetes"] = settings.model_dump(mode="json", exclude_defaults=True)
    gpus = int(resources.get("limits", {}).get(settings.gpu_resource, 0))
    leads = config.topology.leads(task) or task == leading(config)
    return {
        CONFIG_VARIABLE: json.dumps(tree),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Report a dead peer immediately, without gRPC's retries.
        "GRPC_FAIL_FAST": "use_caller",
        # Hide the GPUs, which a pod with a GPU image could otherwise use without a GPU request.
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": "-1"}),
        # Listen on all interfaces, because another pod scrapes the metrics.
        **({METRICS_HOST: EVERY_HOST} if _metrics_port(config, role) else {}),
        # Keep TensorFlow from importing Keras 3, which only tasks that build the model use.
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
        # Make the secret optional, because a pod without a required secret does not start and
        # writes no log. The storage code reports the missing variable.
        reference = {"secretKeyRef": {"name": name, "key": key, "optional": True}}
        secret.append({"name": variable, "valueFrom": reference})
    return [*plain, *secret]


def _resources(config: Config, role: str, pod: PodConfig) -> Tree:
    gpu = config.cluster.kubernetes.gpu_resource
    count = gpu_count(config, Task(role=role, index=0))
    limits = {**({gpu: str(count)} if count else {}), **pod.resources.limits}
    return drop_empty({"requests": dict(pod.resources.requests), "limits": limits})


def _pod_security(pod: PodConfig) -> Tree:
    """Return the settings of the Pod Security Standard `restricted`, and the user's settings."""
    required = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    return {**({} if pod.security == "image" else required), **pod.security_context}


def _container_security(pod: PodConfig) -> Tree:
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
    return text.replace("$", "$$")


def drop_empty(tree: Mapping[str, Any]) -> Tree:
    """Return a tree without empty values; 0 and False are kept."""
    return {key: value for key, value in tree.items() if value not in ("", {}, [], None)}
