"""The settings of each step on a cluster, such as image, resources, deadline and retries.

The image is a run parameter. The other settings are compiled into the pipeline; see
`docs/decisions/0009-pipeline.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfp import dsl, kubernetes

from flotilla.components.image import SECRET_KEYS
from flotilla.components.kubernetes import names
from flotilla.components.table import PREPARE, StepSpec
from flotilla.trainer.config import cluster as pod_fields
from flotilla.trainer.config.load import parse_value
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.uri import KFP_SECRET, find_scheme


def check_image(name: str) -> None:
    """Raise a `ConfigError` unless `name` is a valid image name, or empty for the default."""
    try:
        if name:
            pod_fields.image(name)
    except ValueError as error:
        raise ConfigError(f"--image {error}") from None


def check_target(pipeline_root: str, service_account: str) -> None:
    """Raise a `ConfigError` for a pipeline root or service account that KFP would reject."""
    try:
        if pipeline_root and find_scheme(pipeline_root) == "file":
            raise ConfigError(
                f"--pipeline-root {pipeline_root!r} is a folder, but KFP needs an object store; "
                "use gs://BUCKET/FOLDER, s3://BUCKET/FOLDER or minio://BUCKET/FOLDER"
            )
        if service_account:
            pod_fields.name(service_account)
    except ConfigError:
        raise
    except UserError as error:
        raise ConfigError(f"--pipeline-root {error}") from None
    except ValueError as error:
        raise ConfigError(f"--service-account {error}") from None


_DAY = 24 * 3600
#: Deadline of the whole run in seconds, longer than the deadlines of all its steps together.
RUN_SECONDS = 35 * _DAY
#: Time for which the pods of a finished run and their logs are kept, in seconds.
RETENTION_SECONDS = 7 * _DAY
_GPU = "nvidia.com/gpu"
# KFP replaces this text with the run id before it creates pods. KFP's own placeholders do not work
# in labels, because labels are fixed when the pipeline is compiled.
_RUN_ID = "{{workflow.uid}}"


def configuration() -> dsl.PipelineConfig:
    """Return the KFP settings of the whole run."""
    return dsl.PipelineConfig(
        ttl_seconds_after_finished=RETENTION_SECONDS, active_deadline_seconds=RUN_SECONDS
    )


# A claim that KFP can mount. KFP gives its volume the same name, which must not contain dots.
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PATH = re.compile(r"(/[^/:\s{}]+)+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Do not mount a volume in these folders, which KFP or the system of the image uses.
_TAKEN = (
    "/kfp-launcher", "/gcs", "/s3", "/minio", "/.local", "/.cache", "/.config",
    "/bin", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr",
)  # fmt: skip
_OWN_VARIABLES = ("KFP_", "FLOTILLA_RUN", "TF_CONFIG")
_OWN_LABELS = (names.APP, "pipelines.kubeflow.org/", "pipeline/", "workflows.argoproj.io/")
#: The volume and the folder for the temporary files of a step.
SCRATCH, SCRATCH_FOLDER = "scratch", "/tmp"


def _mount(pair: tuple[str, str]) -> None:
    claim, folder = pair
    if not _CLAIM.fullmatch(claim):
        raise ValueError(
            f"{claim!r} is not the name of a claim that KFP can mount: use up to 63 lowercase "
            "letters, digits and -"
        )
    if not _PATH.fullmatch(folder) or {".", ".."} & set(folder.split("/")):
        raise ValueError(f"{folder!r} is not a folder in a pod: give a path such as /data")
    taken = [each for each in (*_TAKEN, SCRATCH_FOLDER) if f"{folder}/".startswith(f"{each}/")]
    if taken:
        raise ValueError(f"{folder!r} is in a folder that the image or KFP uses: choose another")


def _label(pair: tuple[str, str]) -> None:
    pod_fields.labels(dict([pair]))
    if pair[0].startswith(_OWN_LABELS):
        raise ValueError(f"{pair[0]} is set by Flotilla or by KFP: choose another label")


def _variable(pair: tuple[str, str]) -> None:
    name, value = pair
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is not a variable name: use letters, digits (not first) and _")
    if name in SECRET_KEYS:
        raise ValueError(
            f"{name} is a secret, and the pipeline would expose it; put it in a Kubernetes secret "
            "instead, and pass the name of that secret with --store-secret"
        )
    if name.startswith(_OWN_VARIABLES):
        raise ValueError(f"{name} is set by Flotilla or by KFP: leave it out")
    if "{{" in value or "\0" in value:
        raise ValueError(f"{name}: KFP does not accept a value that contains {{{{")


@dataclass(frozen=True, kw_only=True)
class StepPods:
    """The settings of the steps' pods.

    Attributes:
        cpu, memory: request and limit of each step that handles data. With `cluster.launcher:
            local`, the whole training cluster shares the resources of its step.
        gpus: number of GPUs for the steps that run the model.
        node_selector, tolerations: for all steps except light ones, in the format of Kubernetes.
        store_secret: name of the secret with the keys of the object store. It may be missing.
        pull_secrets: names of the image pull secrets.
        mounts: mount path of each persistent volume claim, for the step that prepares data.
        scratch: size limit of the volume for temporary files, or empty for no volume.
        labels: additional labels of the pods.
        variables: environment variables. They must not be secrets, because the pipeline shows them.
    """

    cpu: str = "1"
    memory: str = "4Gi"
    gpus: str = "0"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    store_secret: str = KFP_SECRET
    pull_secrets: Sequence[str] = ()
    mounts: Mapping[str, str] = field(default_factory=dict)
    scratch: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject settings that the pod of a step cannot have. Raises `ConfigError`."""
        checked: tuple[tuple[str, Callable[[Any], object], Iterable[Any]], ...] = (
            ("--cpu", pod_fields.quantity, [self.cpu]),
            ("--memory", pod_fields.memory, [self.memory]),
            ("--gpus", pod_fields.count, [self.gpus]),
            ("--node-selector", pod_fields.labels, [dict(self.node_selector)]),
            ("--toleration", pod_fields.toleration, self.tolerations),
            ("--store-secret", pod_fields.name, [self.store_secret] if self.store_secret else []),
            ("--pull-secret", pod_fields.name, self.pull_secrets),
            ("--mount", _mount, self.mounts.items()),
            ("--scratch", pod_fields.memory, [self.scratch] if self.scratch else []),
            ("--pod-label", _label, self.labels.items()),
            ("--env", _variable, self.variables.items()),
        )
        for option, check, values in checked:
            for value in values:
                try:
                    check(value)
                except ValueError as error:
                    raise ConfigError(f"{option} {error}") from None
        folders = list(self.mounts.values())
        if len(set(folders)) < len(folders):
            raise ConfigError(f"--mount {max(folders, key=folders.count)} is given twice")

    def apply(self, task: Any, step: StepSpec, given: Mapping[str, Any]) -> None:
        """Configure a task of the pipeline from its table row and the run parameters `given`."""
        task.set_container_image(given["image"])
        self._set_resources(task, step)
        self._set_pod(task, step)
        kubernetes.set_timeout(task, step.deadline_seconds)
        # KFP itself meets the other requirements of the Pod Security Standard `restricted`.
        kubernetes.set_security_context(task, run_as_non_root=True)
        if step.retries:
            task.set_retry(
                step.retries,
                backoff_duration="60s",
                backoff_factor=2.0,
                # This limit includes the first attempt. With KFP's default of one hour, a step that
                # runs longer would never be retried.
                backoff_max_duration=f"{RUN_SECONDS}s",
            )

    def _set_resources(self, task: Any, step: StepSpec) -> None:
        if step.is_light:
            task.set_cpu_request("100m").set_cpu_limit("1")
            task.set_memory_request("512Mi").set_memory_limit("2Gi")
            return
        # Request and limit are equal, because unreserved resources may be missing when needed.
        task.set_cpu_request(self.cpu).set_cpu_limit(self.cpu)
        task.set_memory_request(self.memory).set_memory_limit(self.memory)
        if step.may_use_gpus and self.gpus != "0":
            task.set_accelerator_type(_GPU).set_accelerator_limit(self.gpus)

    def _set_pod(self, task: Any, step: StepSpec) -> None:
        if self.store_secret:
            keys = {key: key for key in SECRET_KEYS}
            kubernetes.use_secret_as_env(task, self.store_secret, keys, optional=True)
        if self.pull_secrets:
            kubernetes.set_image_pull_secrets(task, list(self.pull_secrets))
        for key, value in {**names.app_labels(step.kfp_name, _RUN_ID), **self.labels}.items():
            kubernetes.add_pod_label(task, key, value)
        for name, value in self.variables.items():
            task.set_env_variable(name, value)
        # Do not place light steps on the selected nodes, so that the exit step can report even if
        # those nodes are full.
        if not step.is_light:
            self._place(task)
        if step.name == PREPARE:
            for claim, folder in self.mounts.items():
                kubernetes.mount_pvc(task, claim, folder)

    def _place(self, task: Any) -> None:
        if self.node_selector:
            kubernetes.add_node_selector_json(task, dict(self.node_selector))
        if self.tolerations:
            kubernetes.add_toleration_json(task, list(map(dict, self.tolerations)))
        if self.scratch:
            # Use an emptyDir, because it is world-writable. KFP cannot make any other new volume
            # writable for the user of the image.
            kubernetes.empty_dir_mount(task, SCRATCH, SCRATCH_FOLDER, size_limit=self.scratch)


NO_SETTINGS = StepPods()


def step_pods(
    *,
    node_selector: Sequence[str] = (),
    tolerations: Sequence[str] = (),
    pull_secrets: Sequence[str] = (),
    mounts: Sequence[str] = (),
    labels: Sequence[str] = (),
    variables: Sequence[str] = (),
    **texts: str,
) -> StepPods:
    """Create the settings from option strings. Raises `ConfigError`.

    Node selectors and labels are `KEY=VALUE`, variables `NAME=VALUE`, mounts `CLAIM:FOLDER`, and
    tolerations YAML or JSON. The remaining fields, in `texts`, are passed unchanged.
    """
    return StepPods(
        node_selector=_pairs("--node-selector", node_selector, "=", "KEY=VALUE"),
        tolerations=tuple(map(_toleration, tolerations)),
        pull_secrets=tuple(dict.fromkeys(pull_secrets)),
        mounts=_pairs("--mount", mounts, ":", "CLAIM:FOLDER"),
        labels=_pairs("--pod-label", labels, "=", "KEY=VALUE"),
        variables=_pairs("--env", variables, "=", "NAME=VALUE"),
        **texts,
    )


def _toleration(text: str) -> dict[str, Any]:
    try:
        found = parse_value(text)
    except ConfigError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(
            f"--toleration {text!r} is not a toleration, such as '{{key: spot, operator: Exists}}'"
        )
    return found


def _pairs(option: str, texts: Sequence[str], separator: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, found_separator, value = text.partition(separator)
        if not (name and found_separator):
            raise ConfigError(f"{option} {text!r} does not have the form {form}")
        if name in found:
            raise ConfigError(f"{option} {name} is given twice")
        found[name] = value
    return found
