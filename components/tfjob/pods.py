"""The pod template of one role: pure, from the settings to a dict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from components.pod_defaults import SECRET_KEYS, PodDefaults
from trainer import gpus, last_words
from trainer.cluster import Task
from trainer.config import Config
from trainer.kubernetes_config import SCRATCH, SHARED_MEMORY, WORKING_FOLDER, PodConfig

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
            "env": _environment(pod, {**variables, **own, **pod.env}),
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
            "terminationMessagePath": f"{folder}/{last_words.FILE}",
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }
    )


def _environment(pod: PodConfig, variables: Mapping[str, str]) -> list[Tree]:
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
    count = gpus.count_for(config, Task(role=role, index=0))
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
