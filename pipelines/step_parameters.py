"""The run parameters that are no part of the configuration: of the steps and their pods.

KFP puts them into the pods before any code of ours runs. Where it does so it takes texts alone: a
number would arrive as nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import yaml

from components.image import IMAGE, is_image
from trainer.errors import ConfigError, nearest
from trainer.storage.endpoint import KFP_SECRET

Kind = type[str] | type[list[object]] | type[dict[str, object]]
Default = str | list[object] | dict[str, object]


@dataclass(frozen=True, kw_only=True)
class StepParameter:
    """One run parameter of the steps; `type` is what KFP makes of it."""

    name: str
    type: Kind = str
    default: Default = field(default="")
    description: str


def check_image(name: str) -> None:
    """Raise a `ConfigError` for what `--image` cannot mean; empty stands for the default."""
    if name and not is_image(name):
        raise ConfigError(
            f"--image {name!r} is not the name of an image: write it as host/name:tag"
        )


def step_parameters(image: str = IMAGE) -> tuple[StepParameter, ...]:
    """Return them all; `image` is the default of the image."""
    return (
        StepParameter(
            name="image",
            default=image,
            description="image of all steps, and of a TFJob where cluster_kubernetes names none",
        ),
        StepParameter(
            name="store_secret",
            default=KFP_SECRET,
            description="secret with the keys of the object store: accesskey and secretkey for "
            "minio, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3; one that is not there is "
            "left out",
        ),
        StepParameter(
            name="step_cpu",
            default="1",
            description="CPUs of each working step, such as 500m or 4; with cluster_launcher local "
            "the whole training cluster shares those of its step",
        ),
        StepParameter(
            name="step_memory",
            default="4Gi",
            description="memory of each working step, such as 16Gi; likewise",
        ),
        StepParameter(
            name="step_gpus", default="0", description="GPUs of evaluate-model and export-model"
        ),
        StepParameter(
            name="step_node_selector",
            type=dict,
            default={},
            description="labels that the nodes of the steps have to have (JSON)",
        ),
        StepParameter(
            name="step_tolerations",
            type=list,
            default=[],
            description="taints that do not keep the steps away, as Kubernetes writes them (JSON)",
        ),
    )


def assigned(texts: Sequence[str]) -> dict[str, Default]:
    """Return run parameters of the steps from `NAME=VALUE`; a list or a mapping is YAML or JSON.

    Raises:
        ConfigError: there is no such parameter, or its value is of another form.
    """
    known = {each.name: each for each in step_parameters()}
    found: dict[str, Default] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            hint = nearest(name, known) or f" (there is {', '.join(known)})"
            raise ConfigError(
                f"--parameter {text!r} is no run parameter of the steps as NAME=VALUE{hint}; what "
                "the configuration holds is given by --set"
            )
        found[name] = value if known[name].type is str else _parsed(known[name], value)
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
