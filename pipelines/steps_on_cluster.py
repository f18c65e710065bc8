"""How a step stands on a cluster: its image, resources, secret, deadline and retries.

On this machine a step is a process, and none of this applies: KFP's local runner would wait out
the retries of a failure that a person sees at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp import dsl, kubernetes

from components.pod_defaults import SECRET_KEYS

_HOUR, _DAY = 3600, 24 * 3600
#: The run is ended after so long, whatever its steps say; longer than all of them take together.
RUN_SECONDS = 35 * _DAY
#: An ended run leaves its pods, and with them their logs, for so long.
KEPT_SECONDS = 7 * _DAY
_GPU = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class Step:
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
    "resolve-config": Step(seconds=_HOUR, light=True),
    "prepare-data": Step(seconds=_DAY, retries=3),
    # A TFJob has a deadline of its own, which is shorter by default.
    "train-model": Step(seconds=28 * _DAY, retries=2),
    "evaluate-model": Step(seconds=_DAY, retries=2, may_use_gpus=True),
    "check-gate": Step(seconds=_HOUR, retries=2),
    "export-model": Step(seconds=_DAY, retries=2, may_use_gpus=True),
    "register-model": Step(seconds=_DAY // 4, retries=2),
    "finish": Step(seconds=_HOUR, retries=2, light=True),
}


def configuration() -> dsl.PipelineConfig:
    """Return what holds for the whole run."""
    return dsl.PipelineConfig(
        ttl_seconds_after_finished=KEPT_SECONDS, active_deadline_seconds=RUN_SECONDS
    )


def place(task: Any, asked: Mapping[str, Any]) -> None:
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


def _resources(task: Any, step: Step, asked: Mapping[str, Any]) -> None:
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
