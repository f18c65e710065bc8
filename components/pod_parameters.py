"""The run parameters of the steps' pods: their types, defaults, meaning, and what they have to be.

They are no part of the configuration: KFP writes them into the pods before our code runs. A wrong
one fails the driver of a step, which the KFP UI shows as running for ever: so the command line
checks all of them, and the first step those that can fail a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from components.image import IMAGE
from components.table import STEPS
from trainer.config import pod_fields
from trainer.errors import ConfigError
from trainer.storage.s3_endpoint import KFP_SECRET

Kind = type[str] | type[list[object]] | type[dict[str, object]]
Default = str | list[object] | dict[str, object]
_FORMS = {str: "a text: write it in quotes", list: "a list", dict: "a mapping"}


@dataclass(frozen=True, kw_only=True)
class StepParameter:
    """One run parameter of the steps; `check` raises a `ValueError` for a wrong value."""

    name: str
    type: Kind = str
    default: Default = field(default="")
    description: str
    check: Callable[[Any], object]
    fails_driver: bool = True


def _with_gpus() -> str:
    return " and ".join(step.kfp_name for step in STEPS if step.may_use_gpus)


_PARAMETERS = (
    StepParameter(
        name="image",
        default=IMAGE,
        description="image of all steps, and of a TFJob where cluster_kubernetes names none",
        check=pod_fields.image,
        fails_driver=False,
    ),
    StepParameter(
        name="store_secret",
        default=KFP_SECRET,
        description="secret with the keys of the object store: accesskey and secretkey for "
        "minio, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3; an absent one is left out",
        check=pod_fields.name,
        fails_driver=False,
    ),
    StepParameter(
        name="step_cpu",
        default="1",
        description="CPUs of each working step, such as 500m or 4; with cluster_launcher local "
        "the whole training cluster shares the CPUs of its step",
        check=pod_fields.quantity,
    ),
    StepParameter(
        name="step_memory",
        default="4Gi",
        description="memory of each working step, such as 16Gi; shared likewise",
        check=pod_fields.memory,
    ),
    StepParameter(
        name="step_gpus",
        default="0",
        description=f"GPUs of {_with_gpus()}",
        check=pod_fields.count,
    ),
    StepParameter(
        name="step_node_selector",
        type=dict,
        default={},
        description="labels that the nodes of the working steps must have (JSON)",
        check=pod_fields.labels,
    ),
    StepParameter(
        name="step_tolerations",
        type=list,
        default=[],
        description="taints that the working steps tolerate, as Kubernetes writes them (JSON)",
        check=pod_fields.tolerations,
    ),
)


def step_parameters(image: str = IMAGE) -> tuple[StepParameter, ...]:
    """Return all of them; `image` is the default of the image."""
    first, *others = _PARAMETERS
    return (replace(first, default=image), *others)


def check_parameters(values: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` of one line for the values that are not allowed."""
    wrong = []
    for each in step_parameters():
        value = values.get(each.name, each.default)
        try:
            if not isinstance(value, each.type):
                raise ValueError(f"{value!r} is not {_FORMS[each.type]}")
            each.check(value)
        except ValueError as error:
            wrong.append(f"{each.name}: {error}")
    if wrong:
        raise ConfigError("; ".join(wrong))
