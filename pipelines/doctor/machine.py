"""Checks of a configuration, its storage root and this machine, without slow imports."""

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
from flotilla.pipelines.doctor import Finding, State
from flotilla.pipelines.doctor.cluster import is_on_kubernetes
from flotilla.trainer import signing, storage
from flotilla.trainer.cluster import fitting
from flotilla.trainer.cluster import loopback as ports
from flotilla.trainer.config.schema import Config
from flotilla.trainer.preflight.check import check
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage import uri
from flotilla.trainer.storage.probe import SILENT, Probe, Unfit
from flotilla.trainer.storage.store import Trouble


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
    if uri.speaks_s3(config.storage.root):
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


_LOGINS = {
    "gs": "gcloud auth application-default login",
    "s3": "aws sts get-caller-identity",
    "minio": (
        "export AWS_ACCESS_KEY_ID=$(kubectl get secret mlpipeline-minio-artifact --namespace "
        "kubeflow --output 'go-template={{.data.accesskey | base64decode}}') "
        "AWS_SECRET_ACCESS_KEY=$(kubectl get secret mlpipeline-minio-artifact --namespace "
        "kubeflow --output 'go-template={{.data.secretkey | base64decode}}')"
    ),
}
_POLICY = (
    '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:GetObject",'
    '"s3:PutObject","s3:DeleteObject","s3:AbortMultipartUpload","s3:ListBucket"],"Resource":'
    '["arn:aws:s3:::BUCKET","arn:aws:s3:::BUCKET/*"]}]}'
)


def usable(root: str, probe: Probe) -> Finding:
    """Write, read, list and delete a test file below `root`, and report what fails."""
    try:
        probe.examine()
    except Unfit as unfit:
        left = f"; {probe.uri} could not be deleted; delete it" if "delete" in unfit.actions else ""
        return Finding(
            "fail", f"{_describe_unfit(root, unfit)}{left}", find_remedy(root, unfit.trouble)
        )
    return Finding("ok", f"wrote, read, listed and deleted a test file below {root}")


def signatures(root: str, name: str) -> Finding:
    """Check the signing keys and, if there is a public key, the champion's signature."""
    try:
        keys = ", ".join(signing.check())
        champion = registry.champion(root, name)
        if champion and signing.verify(champion.uri) and signing.verifies():
            signed = f"version {champion.number} of {name} has a valid signature"
            return Finding("ok", f"{keys}; {signed}")
    except UserError as error:
        return Finding("fail", str(error), f"flotilla models show {shlex.quote(name)}")
    return Finding("ok", keys)


def _describe_unfit(root: str, unfit: Unfit) -> str:
    actions = ", ".join(unfit.actions)
    home = root if storage.local_path(root) else uri.locate(root).home
    if unfit.trouble == Trouble.NO_BUCKET.name:
        return f"there is no bucket {home}"
    if unfit.trouble == Trouble.NO_CREDENTIALS.name:
        return f"{home} rejects the credentials, or no credentials are set: {unfit.reason}"
    if unfit.trouble == Trouble.DENIED.name:
        return f"no permission to {actions} below {root}: {unfit.reason}"
    if unfit.trouble == SILENT:
        return f"{home} does not answer: {unfit.reason}"
    return f"cannot {actions} below {root}: {unfit.reason}"


def find_remedy(root: str, trouble: str) -> str:
    """Return the command that fixes or explains a problem, named as in `probe.Unfit.trouble`."""
    folder = storage.local_path(root)
    if folder:
        return f"ls -ld {shlex.quote(str(folder))}; df -h {shlex.quote(str(folder.parent))}"
    location = uri.locate(root)
    if trouble == Trouble.NO_CREDENTIALS.name:
        return _LOGINS[location.scheme]
    return (
        _gcs_remedy(location, trouble) if location.scheme == "gs" else _s3_remedy(location, trouble)
    )


def _gcs_remedy(location: uri.Location, trouble: str) -> str:
    if trouble == Trouble.NO_BUCKET.name:
        return f"gcloud storage buckets create {location.home}"
    if trouble == Trouble.DENIED.name:
        return (
            f"gcloud storage buckets add-iam-policy-binding {location.home} "
            "--member=user:$(gcloud config get account) --role=roles/storage.objectAdmin"
        )
    return f"gcloud storage ls {location.home}"


def _s3_remedy(location: uri.Location, trouble: str) -> str:
    url = uri.find_endpoint(location).url
    at = f" --endpoint-url {url}" if url else ""
    if trouble == Trouble.NO_BUCKET.name:
        return f"aws s3 mb s3://{location.bucket}{at}"
    if trouble == Trouble.DENIED.name:
        policy = _POLICY.replace("BUCKET", location.bucket)
        return (
            "aws iam put-user-policy --user-name USER --policy-name flotilla "
            f"--policy-document '{policy}'"
        )
    return f"aws s3 ls s3://{location.bucket}{at}"
