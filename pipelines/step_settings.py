"""What each step gets on a cluster: its image, resources, secret, deadline and retries.

A step on this machine is a process, and none of this applies: with retries, KFP's local runner
would repeat a failure that the user can see at once.

The run parameters of the steps and their pods are no part of the configuration: KFP writes them
into the pods before any code of ours runs. Where it does so it takes texts only; a number would
arrive as an empty value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from kfp import dsl, kubernetes

from components.image import IMAGE, SECRET_KEYS, is_image
from components.table import STEPS, StepSpec
from trainer.errors import ConfigError, nearest
from trainer.storage.s3_endpoint import KFP_SECRET

Kind = type[str] | type[list[object]] | type[dict[str, object]]
Default = str | list[object] | dict[str, object]


@dataclass(frozen=True, kw_only=True)
class StepParameter:
    """One run parameter of the steps; `type` is its type for KFP."""

    name: str
    type: Kind = str
    default: Default = field(default="")
    description: str


def check_image(name: str) -> None:
    """Raise a `ConfigError` unless `name` is the name of an image, or empty for the default."""
    if name and not is_image(name):
        raise ConfigError(
            f"--image {name!r} is not the name of an image: write it as host/name:tag"
        )


def step_parameters(image: str = IMAGE) -> tuple[StepParameter, ...]:
    """Return all of them; `image` is the default of the image."""
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
            "minio, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3; an absent one is left out",
        ),
        StepParameter(
            name="step_cpu",
            default="1",
            description="CPUs of each working step, such as 500m or 4; with cluster_launcher local "
            "the whole training cluster shares the CPUs of its step",
        ),
        StepParameter(
            name="step_memory",
            default="4Gi",
            description="memory of each working step, such as 16Gi; shared likewise",
        ),
        StepParameter(name="step_gpus", default="0", description=f"GPUs of {_with_gpus()}"),
        StepParameter(
            name="step_node_selector",
            type=dict,
            default={},
            description="labels that the nodes of the steps must have (JSON)",
        ),
        StepParameter(
            name="step_tolerations",
            type=list,
            default=[],
            description="taints that the steps tolerate, as Kubernetes writes them (JSON)",
        ),
    )


def _with_gpus() -> str:
    return " and ".join(step.kfp_name for step in STEPS if step.may_use_gpus)


def assigned(texts: Sequence[str]) -> dict[str, Default]:
    """Return run parameters of the steps from `NAME=VALUE`; a list or a mapping is YAML or JSON.

    Raises:
        ConfigError: there is no such parameter, or its value has the wrong type.
    """
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
    kubernetes.add_node_selector_json(task, given["step_node_selector"])
    kubernetes.add_toleration_json(task, given["step_tolerations"])
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
