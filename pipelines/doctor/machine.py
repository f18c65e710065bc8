"""Checks of a configuration, and of this machine for local runs, without slow imports."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flotilla.components.kubernetes.pods.template import replicas
from flotilla.components.launchers import ENGINES, engine, require_shared
from flotilla.pipelines.doctor.cluster import is_on_kubernetes
from flotilla.pipelines.doctor.examination import Finding, State
from flotilla.trainer.cluster import fitting
from flotilla.trainer.cluster import loopback as ports
from flotilla.trainer.config.schema import Config
from flotilla.trainer.preflight.check import check
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.uri import speaks_s3


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


# Limits of free disk space. Below the first, a run of the example dataset cannot finish. Below the
# second, the disk will soon be full.
LEAST_BYTES, FEW_BYTES = 200 << 20, 2 << 30
# NCCL fails with the 64 MiB of shared memory that a container has by default.
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 256 << 20
_PACKAGES = ("tensorflow", "keras", "tensorflow_datasets", "sklearn", "kfp", "google.cloud.storage")


def packages(config: Config, names: tuple[str, ...] = _PACKAGES) -> Finding:
    """Check that the packages that a run needs are installed."""
    wanted = [*names]
    if speaks_s3(config.storage.root):
        wanted.append("boto3")
    if any(form.startswith("tflite") for form in config.export.formats):
        wanted.append("ai_edge_litert")
    missing = [name for name in wanted if not _is_there(name)]
    if missing:
        extra = "[s3]" if "boto3" in missing else ""
        return Finding("fail", f"not installed: {', '.join(missing)}", f"pip install '.{extra}'")
    return Finding("ok", ", ".join(wanted))


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def disk(workdir: Path) -> Finding:
    """Check the free space below the workdir, or below its nearest existing parent."""
    folder = next(
        each for each in (workdir.absolute(), *workdir.absolute().parents) if each.exists()
    )
    free = shutil.disk_usage(folder).free
    message = f"{free / 2**30:.1f} GiB free at {folder}"
    if free < FEW_BYTES:
        state: State = "fail" if free < LEAST_BYTES else "warn"
        message += ": free some space, or choose another --workdir"
        return Finding(state, message, "flotilla gc")
    return Finding("ok", message)


def loopback(closes: Callable[[], bool] = ports.can_close) -> Finding:
    """Check that local tasks can reach a port of 127.0.0.1, and that other machines cannot."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
    except OSError as error:
        message = f"tasks cannot reach each other on 127.0.0.1: {error.strerror or error}"
        return Finding("fail", message, "ip link set lo up")
    if not closes():
        return Finding("warn", ports.WARNING, "less docs/security.md")
    return Finding("ok", "ports of 127.0.0.1 can be opened, and only this machine can reach them")


def gpus(config: Config) -> Finding:
    """Check that this machine has enough GPUs for the local workers."""
    asked, has = config.cluster.gpus_per_worker, len(glob("/dev/nvidia[0-9]*"))
    if asked > has:
        message = f"cluster.gpus_per_worker is {asked}, but this machine has only {has}"
        return Finding("fail", message, f"flotilla doctor --set cluster.gpus_per_worker={has}")
    return Finding("ok", f"{has} GPUs")


def check_shared_memory(folder: Path = SHARED_MEMORY) -> Finding:
    """Check the shared memory through which NCCL connects the GPUs of one machine."""
    if not folder.is_dir():
        return Finding("fail", f"there is no {folder}", f"mount -t tmpfs tmpfs {folder}")
    total = shutil.disk_usage(folder).total
    message = f"{folder} has {total >> 20} MiB"
    if total < LEAST_SHARED_BYTES:
        return Finding(
            "warn", f"{message}, too little for NCCL", f"mount -o remount,size=2G {folder}"
        )
    return Finding("ok", message)
