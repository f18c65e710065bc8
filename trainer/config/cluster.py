"""The `cluster` section: the training tasks, where they run, and the settings of their pods.

In `cluster.kubernetes`, `pod` applies to all roles, and a role's own value overrides it: mappings
are merged by key, and any other value that is not empty replaces the value in `pod`. The text in an
`Annotated` type is the name of that type on the reference page.

Validators refuse what Kubernetes would refuse minutes later, in an event that few users see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from flotilla.trainer.config.base import MOST, Free, Section, Whole, key, suggest
from flotilla.trainer.config.topology import ROLES
from flotilla.trainer.runtime.errors import nearest

# Quantities that `resource.ParseQuantity` of apimachinery accepts, but without a sign, because pods
# accept no negative quantities.
_QUANTITY = re.compile(
    r"(?P<number>[0-9]{1,18}(\.[0-9]{0,9})?|\.[0-9]{1,9})"
    r"(?P<unit>[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {unit: 1 << (10 * power) for power, unit in enumerate("KMGTPE", start=1)}
_LEAST_MEMORY = 2**20
# Image names as in github.com/distribution/reference. The first part is a host if it contains a
# dot, a port or brackets (IPv6). Only a host may contain capital letters.
_HOST = r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:\d+)?|[A-Za-z0-9-]+:\d+|\[[0-9A-Fa-f:]+\](:\d+)?)"
_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"({_HOST}/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?", re.ASCII
)
_NAME, _LABEL = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_WORD = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY, _VALUE = rf"({_NAME}/)?{_WORD}", rf"({_WORD})?"
_OPERATORS, _EFFECTS = ("Equal", "Exists"), ("NoSchedule", "PreferNoSchedule", "NoExecute")
_TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")


def quantity(text: str) -> str:
    """Validate a quantity, for example of CPUs."""
    amount(text)
    return text


def memory(text: str) -> str:
    """Validate an amount of memory for a container. Without a unit, it is in bytes."""
    if amount(text) < _LEAST_MEMORY:
        raise ValueError(f"{text!r} is less than 1Mi; write it with its unit, such as 4Gi")
    return text


def count(text: str) -> str:
    """Validate a number of GPUs."""
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise ValueError(f"{text!r} is not a number of GPUs; write 0 or more")
    return text


def image(name: str) -> str:
    """Validate the name of an image, with or without host, tag and digest."""
    if not _IMAGE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of an image; write it as host/name:tag")
    return name


def name(text: str) -> str:
    """Validate the name of an object such as a secret."""
    if not re.fullmatch(_NAME, text):
        raise ValueError(
            f"{text!r} is not a valid Kubernetes name; use lowercase letters, digits, - and ."
        )
    return text


def labels(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Validate the labels of a pod or of a node selector."""
    for label, value in tree.items():
        if not isinstance(label, str) or not re.fullmatch(_KEY, label):
            raise ValueError(
                f"{label!r} is not a valid label key, such as pool or example.com/pool"
            )
        if not isinstance(value, str):
            raise ValueError(f'{label}: {value!r} is not a string; write it in quotes: "{value}"')
        if not re.fullmatch(_VALUE, value):
            raise ValueError(
                f"{label}: {value!r} is not a valid label value; use up to 63 letters, digits, -, "
                "_ and ., with a letter or a digit first and last"
            )
    return tree


def toleration(tree: Any) -> Any:
    """Validate one toleration."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{tree!r} is not a toleration; write it as {{key: K, operator: Exists}}")
    for name, value in tree.items():
        if name not in _TOLERATION:
            raise ValueError(f"{name!r} is not a field of a toleration{suggest(name, _TOLERATION)}")
        if name != "tolerationSeconds" and not isinstance(value, str):
            raise ValueError(f"{name}: {value!r} is not a string; write it in quotes")
    _check_choice("operator", tree.get("operator", ""), _OPERATORS)
    _check_choice("effect", tree.get("effect", ""), _EFFECTS)
    exists = tree.get("operator") == "Exists"
    if exists and tree.get("value"):
        raise ValueError("a toleration with the operator Exists has no value; leave value out")
    if not exists and not tree.get("key"):
        raise ValueError("a toleration without a key needs the operator Exists")
    if tree.get("key") and not re.fullmatch(_KEY, tree["key"]):
        raise ValueError(f"key: {tree['key']!r} is not a valid taint key")
    if not re.fullmatch(_VALUE, tree.get("value", "")):
        raise ValueError(f"value: {tree['value']!r} is not a valid taint value")
    if "tolerationSeconds" in tree:
        _check_seconds(tree)
    return tree


def amount(text: str) -> Decimal:
    """Return a quantity as a number of bytes or of CPUs. Raises `ValueError`."""
    found = _QUANTITY.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r} is not a Kubernetes quantity; write a number with a unit such as 500m, 4 or "
            "16Gi (m, k, M, G, T; Ki, Mi, Gi, Ti)"
        )
    number, unit = Decimal(found["number"]), found["unit"] or ""
    if unit.endswith("i"):
        return number * _BINARY[unit[0]]
    power = _DECIMAL[unit] if unit in _DECIMAL else int(unit[1:] or 0)
    return number * Decimal(f"1e{power}")


def _check_choice(what: str, word: str, allowed: tuple[str, ...]) -> None:
    if word and word not in allowed:
        raise ValueError(f"{what}: {word!r} is unknown to Kubernetes{suggest(word, allowed)}")


def _check_seconds(tree: Mapping[str, Any]) -> None:
    seconds = tree["tolerationSeconds"]
    # KFP passes every number as a double, so a whole number may be a float.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds % 1:
        raise ValueError(f"tolerationSeconds: {seconds!r} is not a whole number")
    if tree.get("effect") != "NoExecute":
        raise ValueError("tolerationSeconds needs the effect NoExecute")


SHARED_MEMORY, SCRATCH, TEMPORARY = "shared-memory", "scratch", "temporary"
WORKING_FOLDER = "/flotilla"
# One year, in seconds. This is far below the limit of the 32-bit counts in Kubernetes.
MOST_SECONDS = 365 * 24 * 3600


def _text_of_number(value: object) -> object:
    return f"{value}" if isinstance(value, int | float) and not isinstance(value, bool) else value


Name = Annotated[str, "name", StringConstraints(pattern=f"^({_NAME})?$")]
Named = Annotated[str, "name", StringConstraints(pattern=f"^{_NAME}$")]
Label = Annotated[str, "name", StringConstraints(pattern=f"^{_LABEL}$")]
LabelOrNone = Annotated[str, "name", StringConstraints(pattern=f"^({_LABEL})?$")]
Key = Annotated[str, "key", StringConstraints(pattern=f"^{_KEY}$")]
LabelText = Annotated[str, "value", StringConstraints(pattern=f"^{_VALUE}$")]
Variable = Annotated[str, "variable", StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Quantity = Annotated[
    str,
    "quantity, such as `4`, `500m` or `8Gi`",
    BeforeValidator(_text_of_number),
    AfterValidator(quantity),
]
Size = Annotated[str, "quantity, such as `2Gi`", AfterValidator(lambda text: text and memory(text))]
Image = Annotated[str, "image", AfterValidator(lambda name: name and image(name))]
Toleration = Annotated[Free, AfterValidator(toleration)]
Folder = Annotated[str, "path, such as `/data`", StringConstraints(pattern=r"^/[^:\s]+$")]
SecretKey = Annotated[
    str, "`secret/key`", StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*/[A-Za-z0-9._-]+$")
]
Seconds = Annotated[int, Field(ge=0, le=MOST_SECONDS)]


def _refuse_reserved(*prefixes: str) -> Callable[[dict[str, str]], dict[str, str]]:
    def check(names: dict[str, str]) -> dict[str, str]:
        for name in names:
            if name.startswith(prefixes):
                raise ValueError(
                    f"{name} is set by Flotilla or by the job's operator; leave it out"
                )
        return names

    return check


_refuse_reserved_variables = _refuse_reserved("TF_CONFIG", "FLOTILLA_")
_refuse_reserved_keys = _refuse_reserved(
    "training.kubeflow.org/", "jobset.sigs.k8s.io/", "flotilla/", "app.kubernetes.io/"
)


# The fields of a pod's security context. The API server would silently drop any other field. The
# fields of a container's security context belong in `security`.
_SECURITY_FIELDS = (
    "appArmorProfile", "fsGroup", "fsGroupChangePolicy", "runAsGroup", "runAsNonRoot", "runAsUser",
    "seLinuxChangePolicy", "seLinuxOptions", "seccompProfile", "supplementalGroups",
    "supplementalGroupsPolicy", "sysctls", "windowsOptions",
)  # fmt: skip


def _refuse_unknown_security(fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in _SECURITY_FIELDS:
            hint = nearest(name, _SECURITY_FIELDS) or "; for fields of a container, set security"
            raise ValueError(f"{name} is not a field of a pod's securityContext{hint}")
    return fields


class ResourcesConfig(Section):
    """Resources of a pod by name: cpu, memory, ephemeral-storage and so on."""

    requests: dict[Key, Quantity] = key({}, "resources that the scheduler reserves for a pod")
    limits: dict[Key, Quantity] = key({}, "maximum resources that a pod may use")


class VolumeConfig(Section):
    """A volume that every pod of a role mounts."""

    name: Label = Field(description="name of the volume")
    mount_path: Folder = Field(description="folder in the container")
    source: Free = Field(
        min_length=1,
        description="volume source in Kubernetes syntax, such as {persistentVolumeClaim: {...}}",
    )
    read_only: bool = key(False, "mount read-only")


class PodConfig(Section):
    """The pods of one role, or of all roles."""

    image: Image = key("", "container image; empty: the image of the pipeline")
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = key(
        "", "when the image is pulled; empty: the default of Kubernetes"
    )
    image_pull_secrets: tuple[Named, ...] = key((), "names of the secrets for pulling the image")
    command: tuple[str, ...] = key((), "command that replaces `python -m flotilla.trainer task`")
    resources: ResourcesConfig = Field(ResourcesConfig())
    node_selector: dict[Key, LabelText] = key({}, "labels that a node must have to run the pods")
    tolerations: tuple[Toleration, ...] = key((), "tolerations of the pods, in Kubernetes syntax")
    affinity: Free = key({}, "affinity of the pods, in Kubernetes syntax")
    priority_class: Name = key("", "priority class of the pods")
    scheduler: Name = key("", "name of the scheduler of the pods")
    labels: dict[Key, LabelText] = key({}, "labels of the pods")
    annotations: dict[Key, str] = key({}, "annotations of the pods")
    service_account: Name = key(
        "", "service account of the pods; empty: the step's or, in another namespace, the default"
    )
    volumes: tuple[VolumeConfig, ...] = key((), "additional volumes of the pods")
    shared_memory: Size = key("", "size of /dev/shm; empty: the default of the container runtime")
    scratch: Size = key("", "size limit of the working folder's volume; empty: no limit")
    working_folder: str = key(
        "", f"working folder of a task; empty: {WORKING_FOLDER}", pattern=r"^(/[^:\s]+)?$"
    )
    env: dict[Variable, str] = key(
        {}, "environment variables; not for secrets, because the job's manifest shows them"
    )
    env_from_secrets: tuple[Named, ...] = key((), "secrets whose keys become environment variables")
    env_from_config_maps: tuple[Named, ...] = key(
        (), "config maps whose keys become environment variables"
    )
    secret_env: dict[Variable, SecretKey] = key(
        {}, "environment variables from secrets: {variable: secret/key}"
    )
    security: Literal["", "restricted", "writable", "image"] = key(
        "",
        "restricted (the default): enforce the Pod Security Standard of this name and a read-only "
        "root file system; writable: the same with a writable root; image: set only the fields of "
        "security_context",
    )
    security_context: Free = key(
        {},
        "fields of the pod's securityContext that override the fields of security, such as "
        "{fsGroup: 2000}",
    )
    restart_policy: Literal["", "ExitCode", "OnFailure", "Always", "Never"] = key(
        "",
        "restart policy of the pods; empty: ExitCode, or OnFailure for the evaluator; jobset "
        "supports only these defaults",
    )
    grace_seconds: Seconds = key(
        0, "seconds between SIGTERM and SIGKILL, for saving a last checkpoint; 0: the default, 120"
    )

    _variables_of_the_user = field_validator("env", "secret_env")(_refuse_reserved_variables)
    _keys_of_the_user = field_validator("labels", "annotations")(_refuse_reserved_keys)
    _security_fields = field_validator("security_context")(_refuse_unknown_security)

    @model_validator(mode="after")
    def _volumes_apart(self) -> PodConfig:
        names = [SHARED_MEMORY, SCRATCH, TEMPORARY, *(volume.name for volume in self.volumes)]
        paths = [volume.mount_path.rstrip("/") for volume in self.volumes]
        for kind, all_of_them in (("name", names), ("mount_path", paths)):
            twice = [each for each in all_of_them if all_of_them.count(each) > 1]
            if twice:
                raise ValueError(
                    f"volumes: the {kind} {twice[0]!r} is already used; choose another"
                )
        return self


class SchedulingConfig(Section):
    """Gang scheduling with `tfjob`: all pods of the job start together, or none starts."""

    gang: bool = key(False, "schedule all pods of the job together")
    min_available: int = key(0, "minimum number of pods to start together; 0: all", ge=0, lt=2**31)
    queue: Name = key("", "queue of the gang scheduler")
    priority_class: Name = key("", "priority class of the group of pods")
    timeout_seconds: Seconds = key(0, "time limit for scheduling the group of pods; 0: no limit")


class JobConfig(Section):
    """Settings of the whole job, and its Kueue queue."""

    clean_pod_policy: Literal["Running", "All", "None"] = key(
        "Running", "which pods to delete when the job has ended; jobset supports only Running"
    )
    ttl_seconds: Seconds = key(86_400, "seconds after which an ended job is deleted")
    active_deadline_seconds: Seconds = key(
        604_800, "maximum seconds that the job may run, enforced by the operator", ge=1
    )
    backoff_limit: int | None = key(
        None,
        "maximum number of restarts by the operator; null: no limit for tfjob, 1000 for jobset",
        ge=0,
        lt=2**31,
    )
    queue_name: LabelOrNone = key("", "name of the Kueue local queue")
    suspend: bool = key(False, "create the job suspended, so that Kueue can admit it")
    labels: dict[Key, LabelText] = key({}, "labels of the job")
    annotations: dict[Key, str] = key({}, "annotations of the job")
    scheduling: SchedulingConfig = Field(SchedulingConfig())

    _keys_of_the_user = field_validator("labels", "annotations")(_refuse_reserved_keys)


class DeadlinesConfig(Section):
    """Time limits in seconds, after which the job is ended. 0 means no limit."""

    operator: Seconds = key(60, "time within which the controller of the job must react")
    queueing: Seconds = key(3600, "time within which every pod must be scheduled")
    starting: Seconds = key(900, "time within which all tasks must start after they are scheduled")
    container: Seconds = key(120, "time for which an image pull or a container start may fail")
    running: Seconds = key(0, "time within which the job must end after all tasks have started")
    stalling: Seconds = key(1800, "time without training progress after all tasks have started")
    unreachable: Seconds = key(900, "time without a response from the Kubernetes API")
    heartbeat: Seconds = key(
        300,
        "time without a heartbeat from the launcher, after which the leading task ends the job",
        ge=1,
    )


class KubernetesConfig(Whole):
    """Settings of the Kubernetes job and its pods."""

    namespace: LabelOrNone = key("", "namespace of the job; empty: the namespace of the step")
    gpu_resource: Key = key("nvidia.com/gpu", "Kubernetes name of the GPU resource")
    chiefless: bool = key(False, "run without a chief: worker 0 leads and also trains")
    job: JobConfig = Field(JobConfig())
    deadlines: DeadlinesConfig = Field(DeadlinesConfig())
    pod: PodConfig = key(PodConfig(), "settings for the pods of every role")
    chief: PodConfig = key(PodConfig(), "pod settings of this role; they override those in pod")
    ps: PodConfig = key(PodConfig(), "pod settings of this role; they override those in pod")
    worker: PodConfig = key(PodConfig(), "pod settings of this role; they override those in pod")
    evaluator: PodConfig = key(PodConfig(), "pod settings of this role; they override those in pod")

    @model_validator(mode="after")
    def _mounts_apart(self) -> KubernetesConfig:
        for role in ROLES:
            pod = self.of(role)
            taken = {pod.working_folder or WORKING_FOLDER, "/dev/shm"}
            for volume in pod.volumes:
                if volume.mount_path.rstrip("/") in taken:
                    raise ValueError(
                        f"{role}: the mount_path {volume.mount_path!r} is already used in the "
                        "pod; choose another"
                    )
            twice = sorted(set(pod.env) & set(pod.secret_env))
            if twice:
                raise ValueError(
                    f"{role}: {twice[0]} is in both env and secret_env; remove it from one of them"
                )
        return self

    def of(self, role: str) -> PodConfig:
        """Return the settings of a role, merged with the settings of all roles."""
        over: PodConfig = getattr(self, role)
        return _merge(self.pod, over)


_Laid = TypeVar("_Laid", bound=Section)


def _merge(base: _Laid, over: _Laid) -> _Laid:
    """Override `base` with the values set in `over`: mappings by key, other values as a whole."""
    laid: dict[str, Any] = {}
    for name in type(base).model_fields:
        below, above = getattr(base, name), getattr(over, name)
        if isinstance(below, Section):
            laid[name] = _merge(below, above)
        elif isinstance(below, dict):
            laid[name] = {**below, **above}
        else:
            laid[name] = above or below
    return base.model_copy(update=laid)


# The lowest port that does not require root, and the ports that the tasks of a pod use.
LOWEST_PORT, TASK_PORTS = 1024, (2222, 2223)
Launcher = Literal["local", "tfjob", "jobset", "auto"]


def server_number(name: str) -> int:
    """Return the index in a parameter server's name such as "ps:0", or -1 for any other string."""
    role, _, index = name.partition(":")
    # `isdigit` accepts digits of other scripts, some of which `int` rejects.
    return int(index) if role == "ps" and index.isascii() and index.isdigit() else -1


class ClusterConfig(Section):
    """The training tasks of the cluster, and where they run."""

    launcher: Launcher = key(
        "local",
        "how tasks are started: as local processes, a TFJob or a JobSet; auto: a TFJob or JobSet, "
        "whichever the cluster supports, or as local processes if there is no cluster",
    )
    parameter_servers: int = key(1, "number of parameter servers", ge=1, le=1000)
    workers: int = key(
        2, "number of workers; at most data.shards if data.partition is disjoint", ge=1, le=10_000
    )
    evaluator: bool = key(False, "evaluate each checkpoint in a separate task")
    gpus_per_worker: int = key(
        0, "number of GPUs for each worker, or for the chief if there are no workers", ge=0, le=1000
    )
    gpu_memory_mb: int = key(
        0, "memory to reserve on each GPU, in megabytes; 0: allocate on demand", ge=0, le=MOST
    )
    gpu_memory_fraction: float = key(
        0.0, "share of each GPU's memory to reserve; 0: allocate on demand", ge=0, lt=1
    )
    communication: Literal["auto", "ring", "nccl"] = key(
        "auto", "how the workers of multi_worker_mirrored exchange gradients; nccl needs GPUs"
    )
    placement: dict[str, str] = key(
        {}, 'parameter server of the variables that a glob matches: {"hidden_0/*": "ps:0"}'
    )
    existing_servers: bool = key(
        False, "connect to the running servers in TF_CONFIG, instead of starting servers"
    )
    in_process: bool = key(
        False, "run parameter servers and workers as threads of the chief, for debugging"
    )
    max_restarts: int = key(
        3,
        "maximum number of restarts, counted over all tasks except the evaluator; on Kubernetes, "
        "each new checkpoint resets the count of lost pods",
        ge=0,
        le=MOST,
    )
    recovery: Literal["auto", "partial", "full"] = key(
        "auto",
        "which variables to restore from the last checkpoint after a parameter server dies; "
        "partial: the lost ones; full: all; auto: partial if training is asynchronous, else full",
    )
    metrics_port: int = key(
        0,
        "port on which the leading task (the chief or worker 0) serves Prometheus metrics; 0: none",
        ge=0,
        lt=2**16,
    )
    kubernetes: KubernetesConfig = key(
        KubernetesConfig(), "settings of the Kubernetes job and its pods"
    )

    @field_validator("metrics_port")
    @classmethod
    def _free(cls, value: int) -> int:
        if 0 < value < LOWEST_PORT or value in TASK_PORTS:
            raise ValueError(
                f"{value} is not available in a pod; choose a port from {LOWEST_PORT} up, "
                f"except {' and '.join(map(str, TASK_PORTS))}, which the tasks use"
            )
        return value

    @field_validator("placement")
    @classmethod
    def _check_placement(cls, value: dict[str, str]) -> dict[str, str]:
        for glob, server in value.items():
            if server_number(server) < 0:
                raise ValueError(f"{glob!r} is placed on {server!r}; write the server as ps:0")
        return value
