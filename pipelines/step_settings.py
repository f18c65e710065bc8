"""What each step gets on a cluster: its image, resources, secret, deadline, retries and pods.

Most of it is a run parameter. KFP's driver has no value that means no secret or claim: what most
runs do without is compiled into the pods (`StepPods`), see `docs/decisions/0009-pipeline.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from kfp import dsl, kubernetes

from components.image import SECRET_KEYS
from components.kubernetes import names
from components.pod_parameters import Default, StepParameter, check_parameters, step_parameters
from components.table import StepSpec, maker_of
from trainer.config import pod_fields
from trainer.errors import ConfigError, UserError, nearest
from trainer.storage.uri import scheme_of


def check_image(name: str) -> None:
    """Raise a `ConfigError` unless `name` is the name of an image, or empty for the default."""
    try:
        if name:
            pod_fields.image(name)
    except ValueError as error:
        raise ConfigError(f"--image {error}") from None


def check_target(pipeline_root: str, service_account: str) -> None:
    """Raise a `ConfigError` for what no driver of KFP takes; empty for the instance's default."""
    try:
        if pipeline_root and scheme_of(pipeline_root) == "file":
            raise ConfigError(
                f"--pipeline-root {pipeline_root!r} is a folder: KFP keeps artifacts in an object "
                "store, at gs://, s3:// or minio://BUCKET/FOLDER"
            )
        if service_account:
            pod_fields.name(service_account)
    except ConfigError:
        raise
    except UserError as error:
        raise ConfigError(f"--pipeline-root {error}") from None
    except ValueError as error:
        raise ConfigError(f"--service-account {error}") from None


def assigned(texts: Sequence[str]) -> dict[str, Default]:
    """Return run parameters of the steps from `NAME=VALUE`, where lists are YAML or JSON."""
    known = {each.name: each for each in step_parameters()}
    found: dict[str, Default] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            hint = nearest(name, known) or f" (there is {', '.join(known)})"
            raise ConfigError(
                f"--parameter {text!r} is not a run parameter of the steps as NAME=VALUE{hint}; "
                "set keys of the configuration by --set"
            )
        found[name] = value if known[name].type is str else _parsed(known[name], value)
    try:
        check_parameters(found)
    except ConfigError as error:
        raise ConfigError(f"--parameter {error}") from None
    return found


def _parsed(parameter: StepParameter, value: str) -> Default:
    form = "a list" if isinstance(parameter.default, list) else "a mapping"
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = None
    if not isinstance(parsed, type(parameter.default)):
        raise ConfigError(f"--parameter {parameter.name}: {value!r} is not {form} of YAML or JSON")
    return parsed


_DAY = 24 * 3600
#: Deadline of the whole run; longer than the deadlines of all its steps together.
RUN_SECONDS = 35 * _DAY
#: How long the pods of an ended run, and with them their logs, are retained.
RETENTION_SECONDS = 7 * _DAY
_GPU = "nvidia.com/gpu"
# KFP writes the id of a run in the place of this text, wherever a compiled pipeline has it, before
# its pods are made. Its own placeholders are none in labels, which it takes at this time alone.
_RUN_ID = "{{workflow.uid}}"


def configuration() -> dsl.PipelineConfig:
    """Return the settings of the whole run."""
    return dsl.PipelineConfig(
        ttl_seconds_after_finished=RETENTION_SECONDS, active_deadline_seconds=RUN_SECONDS
    )


def apply(task: Any, step: StepSpec, given: Mapping[str, Any]) -> None:
    """Set up a task of the pipeline by its row of the table and the values of run parameters."""
    task.set_container_image(given["image"])
    _resources(task, step, given)
    kubernetes.use_secret_as_env(
        task, given["store_secret"], {key: key for key in SECRET_KEYS}, optional=True
    )
    if not step.is_light:
        # A light step runs where the pods of KFP run: the first one checks what the others get, and
        # the last one reports, whatever that is.
        kubernetes.add_node_selector_json(task, given["step_node_selector"])
        kubernetes.add_toleration_json(task, given["step_tolerations"])
    for key, value in names.app_labels(step.kfp_name, _RUN_ID).items():
        kubernetes.add_pod_label(task, key, value)
    kubernetes.set_timeout(task, step.deadline_seconds)
    # All else that the Pod Security Standard `restricted` requires KFP sets by itself.
    kubernetes.set_security_context(task, run_as_non_root=True)
    if step.retries:
        task.set_retry(
            step.retries,
            backoff_duration="60s",
            backoff_factor=2.0,
            # KFP counts from the start of the first attempt to the end of each later one: its
            # default of one hour would allow no second attempt of a longer step.
            backoff_max_duration=f"{RUN_SECONDS}s",
        )


def _resources(task: Any, step: StepSpec, given: Mapping[str, Any]) -> None:
    if step.is_light:
        task.set_cpu_request("100m").set_cpu_limit("1")
        task.set_memory_request("512Mi").set_memory_limit("2Gi")
        return
    # Request and limit are the same: what is not reserved may be missing when it is needed.
    task.set_cpu_request(given["step_cpu"]).set_cpu_limit(given["step_cpu"])
    task.set_memory_request(given["step_memory"]).set_memory_limit(given["step_memory"])
    # KFP looks for the values among the inputs of the group around a step, and adds none of these
    # by itself.
    task.register_pipeline_channels([given["step_cpu"], given["step_memory"]])
    if step.may_use_gpus:
        task.set_accelerator_type(_GPU).set_accelerator_limit(given["step_gpus"])
        task.register_pipeline_channels([given["step_gpus"]])


# KFP names the volume like its claim: no dots.
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PATH = re.compile(r"(/[^/:\s{}]+)+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Folders of KFP's own in the pod of a step, and those without which Python does not start.
_TAKEN = (
    "/kfp-launcher", "/gcs", "/s3", "/minio", "/.local", "/.cache", "/.config",
    "/bin", "/dev", "/etc", "/lib", "/proc", "/sys", "/usr",
)  # fmt: skip
_OWN_VARIABLES = ("KFP_", "FLOTILLA_RUN", "TF_CONFIG")
_OWN_LABELS = (names.APP, "pipelines.kubeflow.org/", "pipeline/", "workflows.argoproj.io/")
#: Where a step keeps what it does not publish.
SCRATCH, SCRATCH_FOLDER = "scratch", "/tmp"


def _mount(pair: tuple[str, str]) -> None:
    claim, folder = pair
    if not _CLAIM.fullmatch(claim):
        raise ValueError(
            f"{claim!r} is not a claim that KFP can mount: use up to 63 small letters, digits and -"
        )
    if not _PATH.fullmatch(folder) or {".", ".."} & set(folder.split("/")):
        raise ValueError(f"{folder!r} is not a folder in a pod: write it as /data")
    taken = [each for each in (*_TAKEN, SCRATCH_FOLDER) if f"{folder}/".startswith(f"{each}/")]
    if taken:
        raise ValueError(f"{folder!r} is in a folder of the image or of KFP: take another one")


def _label(pair: tuple[str, str]) -> None:
    pod_fields.labels(dict([pair]))
    if pair[0].startswith(_OWN_LABELS):
        raise ValueError(f"{pair[0]} is set by Flotilla or by KFP")


def _variable(pair: tuple[str, str]) -> None:
    name, value = pair
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a variable")
    if name in SECRET_KEYS:
        raise ValueError(f"{name} is a secret, which the pipeline would show: see store_secret")
    if name.startswith(_OWN_VARIABLES):
        raise ValueError(f"{name} is set by Flotilla or by KFP")
    if "{{" in value or "\0" in value:
        raise ValueError(f"{name}: KFP takes no value with {{{{ in it")


@dataclass(frozen=True, kw_only=True)
class StepPods:
    """Settings of the pods of the steps.

    Attributes:
        pull_secrets: names of secrets of the registry of the image.
        mounts: folder by claim of a volume, for the step that prepares data.
        scratch: most bytes of the folder for temporary files, a quantity; empty: no limit.
        variables: of the environment; never a secret, as the pipeline shows them.
    """

    pull_secrets: Sequence[str] = ()
    mounts: Mapping[str, str] = field(default_factory=dict)
    scratch: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what the pod of a step cannot have; raises `ConfigError`."""
        checked: tuple[tuple[str, Callable[[Any], object], Iterable[Any]], ...] = (
            ("--pull-secret", pod_fields.name, self.pull_secrets),
            ("--mount", _mount, self.mounts.items()),
            ("--scratch", pod_fields.memory, [self.scratch] if self.scratch else []),
            ("--label", _label, self.labels.items()),
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

    def apply(self, task: Any, step: StepSpec) -> None:
        """Set up a task of the pipeline."""
        if self.pull_secrets:
            kubernetes.set_image_pull_secrets(task, list(self.pull_secrets))
        for key, value in self.labels.items():
            kubernetes.add_pod_label(task, key, value)
        for name, value in self.variables.items():
            task.set_env_variable(name, value)
        if self.scratch and not step.is_light:
            # Its root belongs to everyone, while KFP cannot give a new volume to the image's user.
            kubernetes.empty_dir_mount(task, SCRATCH, SCRATCH_FOLDER, size_limit=self.scratch)
        if step == maker_of("dataset"):
            for claim, folder in self.mounts.items():
                kubernetes.mount_pvc(task, claim, folder)


NO_SETTINGS = StepPods()


def step_pods(
    *,
    pull_secrets: Sequence[str] = (),
    mounts: Sequence[str] = (),
    scratch: str = "",
    labels: Sequence[str] = (),
    variables: Sequence[str] = (),
) -> StepPods:
    """Return the settings from `CLAIM:FOLDER`, `KEY=VALUE`, `NAME=VALUE`; raises `ConfigError`."""
    return StepPods(
        pull_secrets=tuple(dict.fromkeys(pull_secrets)),
        mounts=_pairs("--mount", mounts, ":", "CLAIM:FOLDER"),
        scratch=scratch,
        labels=_pairs("--label", labels, "=", "KEY=VALUE"),
        variables=_pairs("--env", variables, "=", "NAME=VALUE"),
    )


def _pairs(option: str, texts: Sequence[str], separator: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, found_separator, value = text.partition(separator)
        if not (name and found_separator):
            raise ConfigError(f"{option} {text!r} is not of the form {form}")
        if name in found:
            raise ConfigError(f"{option} {name} is given twice")
        found[name] = value
    return found
