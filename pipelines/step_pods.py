"""What KFP takes for the pods of the steps only while a pipeline is compiled.

Everything else about them is a run parameter, see `components.pod_parameters`. KFP's driver refuses
an empty name of a secret or a claim, and has no value that means none: so what most runs do without
is no run parameter. See `docs/decisions/0048-what-is-compiled-into-the-pods.md`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfp import kubernetes

from components.image import SECRET_KEYS
from components.kubernetes import names
from components.table import StepSpec, maker_of
from trainer.config import pod_fields
from trainer.errors import ConfigError

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
        pull_secrets: names of secrets of the registry of the image, for all steps.
        mounts: folder by claim of a volume, for the step that prepares data.
        scratch: most bytes of the folder for temporary files, a quantity; empty: no limit.
        labels: of the pods of all steps.
        variables: of the environment of all steps; never a secret, as the pipeline shows them.
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
    """Return the settings from texts: `CLAIM:FOLDER`, `KEY=VALUE`, `NAME=VALUE`.

    Raises:
        ConfigError: one of them has another form, is given twice, or is not allowed.
    """
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
