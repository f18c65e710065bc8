"""Checks for contradictions in a configuration, and for data that does not fit the model."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from flotilla.components.kubernetes.pods.template import replicas
from flotilla.components.launchers import ENGINES, engine, require_shared
from flotilla.pipelines.doctor.cluster import is_on_kubernetes
from flotilla.pipelines.doctor.examination import Finding
from flotilla.trainer.cluster import fitting
from flotilla.trainer.config.schema import Config
from flotilla.trainer.preflight.check import check
from flotilla.trainer.runtime.errors import ConfigError


def consistent(config: Config, *, elsewhere: bool = False) -> Finding:
    """Check that no keys contradict each other. If `elsewhere`, the steps may run in pods."""
    for message, remedy in _contradictions(config):
        return Finding("fail", message, remedy)
    folder = config.data.manual_dir
    if folder and not os.path.isdir(folder):
        if not elsewhere:
            message = f"data.manual_dir: there is no folder {folder}"
            return Finding("fail", message, _setting("data.manual_dir=FOLDER"))
        message = (
            f"data.manual_dir: {folder} is not on this machine; on a KFP instance, the folder "
            "must be in the image or in a volume"
        )
        return Finding("warn", message, f"docker run --rm HOST/NAME:TAG ls {shlex.quote(folder)}")
    tasks = ", ".join(f"{count} {role}" for role, count in replicas(config).items())
    how = "your own program" if config.program.command else config.training.strategy
    return Finding("ok", f"{config.name}: {how} with {tasks}")


def _contradictions(config: Config) -> Iterator[tuple[str, str]]:
    if not is_on_kubernetes(config):
        return
    launcher = config.cluster.launcher
    for key in ("in_process", "existing_servers"):
        if getattr(config.cluster, key):
            message = f"cluster.{key}: not supported with cluster.launcher {launcher}"
            yield message, _setting(f"cluster.{key}=false")
    job = config.cluster.kubernetes.job
    if job.suspend and not job.queue_name:
        message = "cluster.kubernetes.job.suspend: without a Kueue queue the job waits forever"
        yield message, _setting("cluster.kubernetes.job.queue_name=QUEUE")
    if launcher in ENGINES:
        try:
            engine(launcher).check(config)
        except ConfigError as error:
            yield str(error), _setting("cluster.launcher=tfjob")
    if root := config.storage.root:
        try:
            require_shared(config, root)
        except ConfigError as error:
            yield str(error), _setting("storage.root=gs://BUCKET")


def _setting(assignment: str) -> str:
    return f"flotilla doctor --set '{assignment}'"


_OTHERS = "flotilla doctor --set model.name=NAME --set data.dataset=NAME"


def fits(config: Config, seconds: float = fitting.SECONDS, *, elsewhere: bool = False) -> Finding:
    """Check the source, and try the model on the source's first rows, without using a GPU."""
    if find_spec("tensorflow") is None:
        return Finding("skipped", "TensorFlow is not installed here")
    try:
        result = check(config, is_remote=elsewhere, seconds=seconds)
    except ConfigError as error:
        return Finding("fail", str(error), _OTHERS)
    if not result.found:
        return Finding("warn", "; ".join(result.notes), "flotilla check")
    return Finding("ok", "; ".join([describe_model(config, result.found), *result.notes]))


def describe_model(config: Config, found: Mapping[str, Any]) -> str:
    """Describe the inputs and outputs of the model."""
    takes = ", ".join(f"{name} ({form})" for name, form in found["inputs"].items())
    gives = ", ".join(f"{name} ({form})" for name, form in found["targets"].items())
    return (
        f"{found['model']} ({found['parameters']} parameters) predicts {gives} from {takes} of "
        f"{config.data.name}; {found['why']}"
    )
