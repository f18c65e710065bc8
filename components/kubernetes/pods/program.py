"""The containers of a user's program: the guard in the user's image, and the agent's sidecar.

The agent is a native sidecar (Kubernetes 1.29): an init container that keeps running, with
Flotilla's image. Before its startup probe succeeds, it copies the guard, a single Python file, to
the volume that both containers share. The guard is the command of the user's container. So the
user's image needs Python, but no part of Flotilla. If the image has no Python (`program.python` is
empty), the program itself is the command: Kubernetes restarts it, and there is no agent.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence

from flotilla.components.image import SECRET_KEYS
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.names import Tree
from flotilla.trainer.cluster import termination
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import WORKING_FOLDER, PodConfig
from flotilla.trainer.config.program import EVALUATE, ProgramConfig, fill, task_values
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import ROLES
from flotilla.trainer.runtime.errors import ConfigError

# The folder that a task's agent and guard share, the guard's file, and the socket.
EXCHANGE, GUARD, SOCKET = "exchange", "guard.py", "guard.sock"
# How long a guard waits for an agent that restarts, in seconds.
RECONNECT_SECONDS = 300
INDEX_VARIABLE = "FLOTILLA_TASK_INDEX"
# The user's container starts once the agent listens on its socket.
_PROBE = {"periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": 600}
# The agent needs these resources for uploads of checkpoints with checksums, and for reading shards.
_RESOURCES = {
    "requests": {"cpu": "100m", "memory": "256Mi"},
    "limits": {"cpu": "2", "memory": "1Gi"},
}
# The container can be restricted, because the agent runs no user code.
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_ENTRY = "flotilla.components.kubernetes.pods.program_agent"
# Variables that a program's container has in common with a trainer's container.
_OF_PROGRAM = ("CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED")
# Variables that a program needs to access the object store directly.
_OF_STORE = (*SECRET_KEYS, "STORAGE_EMULATOR_HOST")
_OF_STORE_PREFIXES = ("AWS_", "GOOGLE_")
WITHOUT_AGENT = (
    "program.python is empty: only Kubernetes restarts the program, and Flotilla does not publish "
    "its checkpoints or its model"
)
# Placeholders that have no value without the agent.
_OF_AGENT = ("dataset_files", "checkpoints", "model", "logs", "metrics", "gpu")


def check(config: Config) -> None:
    """Raise a `ConfigError` for pod settings that a program does not support."""
    if not config.program.command:
        return
    for role in ROLES:
        if config.cluster.kubernetes.of(role).command:
            raise ConfigError(
                f"cluster.kubernetes.{role}.command: program.command already sets the command; "
                "remove this key"
            )
    if not config.program.python:
        if config.program.after_training == EVALUATE:
            raise ConfigError(
                "program.after_training: 'evaluate' needs a model, which Flotilla's agent "
                "publishes only if the image has Python; set program.python, or set "
                "program.after_training=stop"
            )
        texts = [("command", text) for text in config.program.command]
        texts += [(f"env.{name}", text) for name, text in config.program.env.items()]
        for (name, text), each in itertools.product(texts, _OF_AGENT):
            if f"{{{each}}}" in text:
                raise ConfigError(
                    f"program.{name}: only Flotilla's agent replaces {{{each}}}, and it needs "
                    "Python in the image; set program.python, or remove the placeholder"
                )


def containers(job: Job, role: str, own: Tree, image: str) -> Tree:
    """Return the containers and the init containers of a program's pod.

    `own` is the container in which Flotilla's trainer would run; `image` is Flotilla's image.
    """
    config = job.config
    pod = config.cluster.kubernetes.of(role)
    user = _container(config, pod, own)
    if not config.program.python:
        plain = [
            {"name": "FLOTILLA_RUN_ID", "value": job.run_id},
            {"name": "FLOTILLA_DATASET", "value": job.dataset},
        ]
        return {"containers": [{**user, "env": [*plain, *user["env"]]}]}
    folder = pod.working_folder or WORKING_FOLDER
    exchange = f"{folder}/{EXCHANGE}"
    guard = [
        config.program.python, f"{exchange}/{GUARD}", "--socket", f"{exchange}/{SOCKET}",
        "--reconnect", str(RECONNECT_SECONDS), "--termination", f"{folder}/{termination.FILE}",
        "--umask", "000", "--",
    ]  # fmt: skip
    # `args` is only informative, because the agent sends the guard the actual command.
    words = [word.replace("$", "$$") for word in config.program.command]
    return {
        "initContainers": [_agent(own, f"{exchange}/{SOCKET}", image)],
        "containers": [{**user, "command": guard, "args": words}],
    }


def _agent(own: Tree, socket: str, image: str) -> Tree:
    kept = ("args", "workingDir", "env", "envFrom", "volumeMounts")
    ports = [each for each in own["ports"] if each["name"] == names.METRICS_PORT]
    return {
        "name": names.AGENT,
        "image": image,
        "restartPolicy": "Always",
        "command": ["python", "-m", _ENTRY],
        **{name: copy.deepcopy(own[name]) for name in kept if name in own},
        **({"ports": ports} if ports else {}),
        "resources": copy.deepcopy(_RESOURCES),
        "startupProbe": {"exec": {"command": ["test", "-S", socket]}, **_PROBE},
        "securityContext": copy.deepcopy(_SECURITY),
    }


def _container(config: Config, pod: PodConfig, own: Tree) -> Tree:
    known = {*pod.env, *pod.secret_env, *_OF_PROGRAM}
    reads_store = config.program.data == "uri" or not config.program.python
    env = [
        each
        for each in own["env"]
        if each["name"] in known
        or (reads_store and each["name"].startswith((*_OF_STORE, *_OF_STORE_PREFIXES)))
    ]
    ports = [each for each in own["ports"] if each["name"] != names.METRICS_PORT]
    rest = {name: value for name, value in own.items() if name not in ("command", "args")}
    # Keep the image's own working folder. If the program sets another one, the guard changes to it.
    rest.pop("workingDir")
    return {**rest, "env": env, "ports": ports}


def set_task(
    spec: Tree,
    config: Config,
    role: str,
    addresses: Mapping[str, Sequence[str]],
    fields: Mapping[str, str],
    *,
    has_tf_config: bool = False,
) -> None:
    """Tell the containers of a pod which task they run. An agent passes this on to its guard.

    `fields` maps names of variables to metadata fields of the pod. One variable contains the task's
    index, and the addresses may refer to the others. With `has_tf_config`, the job's controller
    sets TF_CONFIG in the task's container.
    """
    sources = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    task = f'{{"type": {json.dumps(role)}, "index": $({INDEX_VARIABLE})}}'
    text = f'{{"cluster": {json.dumps(addresses)}, "task": {task}}}'
    tf_config = {"name": "TF_CONFIG", "value": text}
    agents = spec.get("initContainers", [])
    for each in agents or spec["containers"]:
        own = [] if has_tf_config and not agents else [tf_config]
        # A variable must be defined before the variable that refers to it.
        each["env"] = [*sources, *own, *each["env"]]
    if config.program.command and not agents:
        # Kubernetes inserts the index of the task.
        values = task_values(config.training, role, f"$({INDEX_VARIABLE})", addresses)
        _fill_container(spec["containers"][0], config.program, values)


def _fill_container(container: Tree, program: ProgramConfig, values: dict[str, str]) -> None:
    dataset = next(each for each in container["env"] if each["name"] == "FLOTILLA_DATASET")
    values = {**values, "dataset": dataset["value"]}

    def filled(text: str) -> str:
        return fill(text.replace("$", "$$"), values)

    container["env"] += [{"name": n, "value": filled(t)} for n, t in program.env.items()]
    container["command"] = [filled(word) for word in program.command]
    if program.working_dir:
        container["workingDir"] = program.working_dir
