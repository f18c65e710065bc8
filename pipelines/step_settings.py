"""How a step stands on a cluster: its image, resources, secret, deadline and retries.

On this machine a step is a process, and none of this applies: KFP's local runner would wait out
the retries of a failure that a person sees at once.

The run parameters that are no part of the configuration: of the steps and their pods.

KFP puts them into the pods before any code of ours runs. Where it does so it takes texts alone: a
number would arrive as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from kfp import dsl, kubernetes

from components.image import IMAGE, SECRET_KEYS, is_image
from trainer.errors import ConfigError, nearest
from trainer.storage.s3_endpoint import KFP_SECRET

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


_HOUR, _DAY = 3600, 24 * 3600
#: The run is ended after so long, whatever its steps say; longer than all of them take together.
RUN_SECONDS = 35 * _DAY
#: An ended run leaves its pods, and with them their logs, for so long.
KEPT_SECONDS = 7 * _DAY
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What one step needs of the cluster.

    Attributes:
        seconds: the most that one attempt may take, waiting for the image included.
        retries: further attempts; none where a second one finds what the first one found.
        light: whether it needs no more than a little, whatever the run parameters say.
        may_use_gpus: whether it computes with the model.
    """

    seconds: int
    retries: int = 0
    light: bool = False
    may_use_gpus: bool = False


STEPS = {
    "resolve-config": StepSettings(seconds=_HOUR, light=True),
    "prepare-data": StepSettings(seconds=_DAY, retries=3),
    # A TFJob has a deadline of its own, which is shorter by default.
    "train-model": StepSettings(seconds=28 * _DAY, retries=2),
    "evaluate-model": StepSettings(seconds=_DAY, retries=2, may_use_gpus=True),
    "check-gate": StepSettings(seconds=_HOUR, retries=2),
    "export-model": StepSettings(seconds=_DAY, retries=2, may_use_gpus=True),
    "register-model": StepSettings(seconds=_DAY // 4, retries=2),
    "finish": StepSettings(seconds=_HOUR, retries=2, light=True),
}


def configuration() -> dsl.PipelineConfig:
    """Return what holds for the whole run."""
    return dsl.PipelineConfig(
        ttl_seconds_after_finished=KEPT_SECONDS, active_deadline_seconds=RUN_SECONDS
    )


def apply(task: Any, asked: Mapping[str, Any]) -> None:
    """Set up a task of the pipeline by the run parameters that are `asked` for."""
    step = STEPS[task.component_spec.name]
    task.set_container_image(asked["image"])
    _resources(task, step, asked)
    kubernetes.use_secret_as_env(
        task, asked["store_secret"], {key: key for key in SECRET_KEYS}, optional=True
    )
    kubernetes.add_node_selector_json(task, asked["step_node_selector"])
    kubernetes.add_toleration_json(task, asked["step_tolerations"])
    kubernetes.set_timeout(task, step.seconds)
    if step.retries:
        task.set_retry(
            step.retries,
            backoff_duration="60s",
            backoff_factor=2.0,
            # Counted from the first attempt's begin, and the end of every later one: KFP's own hour
            # would allow no second attempt at anything that takes longer.
            backoff_max_duration=f"{RUN_SECONDS}s",
        )


def _resources(task: Any, step: StepSettings, asked: Mapping[str, Any]) -> None:
    if step.light:
        task.set_cpu_request("100m").set_cpu_limit("1")
        task.set_memory_request("512Mi").set_memory_limit("2Gi")
        return
    # The same for both: what is not set aside is not there when it is needed.
    task.set_cpu_request(asked["step_cpu"]).set_cpu_limit(asked["step_cpu"])
    task.set_memory_request(asked["step_memory"]).set_memory_limit(asked["step_memory"])
    # KFP looks for the values among the inputs of the group around a step, and puts none of these
    # there by itself.
    task.register_pipeline_channels([asked["step_cpu"], asked["step_memory"]])
    if step.may_use_gpus:
        task.set_accelerator_type(_GPU).set_accelerator_limit(asked["step_gpus"])
        task.register_pipeline_channels([asked["step_gpus"]])
