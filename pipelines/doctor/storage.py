"""Checks of the storage root, its keys in the pods' secret, and the signatures of models."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from flotilla.components.kubernetes.client import RefusedError
from flotilla.pipelines.doctor.cluster import Cluster
from flotilla.pipelines.doctor.examination import Finding
from flotilla.trainer import signing, storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.promotion import registry
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import uri
from flotilla.trainer.storage.probe import SILENT, Probe, Unfit
from flotilla.trainer.storage.store import Trouble

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


# A complete pair of keys. The third key, a session token, is optional.
_PAIR = frozenset(uri.BOTO_KEYS[:2])


def opens(cluster: Cluster, config: Config) -> Finding:
    """Warn, but do not fail, if the secret has no complete key pair: pods may use a role."""
    where, lacking = cluster.namespace, "does not have both keys for this store"
    pairs = [_PAIR]
    root = config.storage.root
    if uri.speaks_s3(root) and uri.find_endpoint(uri.locate(root)).kfp_secret:
        pairs.append(frozenset(uri.KFP_KEYS))
    try:
        data = cluster.api.read(f"/api/v1/namespaces/{where}/secrets/{uri.KFP_SECRET}").get("data")
    except RefusedError as error:
        if not error.is_missing:
            raise
        data, lacking = None, "does not exist"
    keys = set(data) if isinstance(data, Mapping) else set()
    if any(pair <= keys for pair in pairs):
        return Finding("ok", uri.KFP_SECRET)
    message = (
        f"the secret {uri.KFP_SECRET} {lacking}: the pods can use the store only through a role of "
        "their service account"
    )
    return Finding("warn", message, f"kubectl get secret {uri.KFP_SECRET} --namespace {where}")
