"""What each step gets on a cluster: its image, resources, secret, deadline and retries.

A step on this machine is a process, and none of this applies: with retries, KFP's local runner
would repeat a failure that the user can see at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from kfp import dsl, kubernetes

from components.image import SECRET_KEYS
from components.kubernetes import names
from components.pod_parameters import Default, StepParameter, check_parameters, step_parameters
from components.table import StepSpec
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
    """Return run parameters of the steps from `NAME=VALUE`; a list or a mapping is YAML or JSON.

    Raises:
        ConfigError: there is no such parameter, or its value is not allowed.
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
