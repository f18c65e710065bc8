"""The run parameters that are no part of the configuration: of the steps and their pods.

KFP puts them into the pods before any code of ours runs. Where it does so it takes texts alone: a
number would arrive as nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from components.image import IMAGE
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
