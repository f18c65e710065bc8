"""The secret that opens the object store for the pods of a run: it may lack keys, or be absent."""

from __future__ import annotations

from collections.abc import Mapping

from pipelines.doctor.finding import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, told
from trainer.config import Config
from trainer.storage.endpoint import BOTO_KEYS, KFP_KEYS, KFP_SECRET

# The third one is of passing credentials alone.
_PAIR = frozenset(BOTO_KEYS[:2])


def opens(kubernetes: Kubernetes, config: Config) -> Finding:
    """Say whether the secret holds a whole pair of keys for the store of the configuration.

    Without one the pods rely on a role of their service account, which may well be meant.
    """
    path = f"/api/v1/namespaces/{kubernetes.namespace}/secrets/{KFP_SECRET}"
    show = f"kubectl get secret {KFP_SECRET} --namespace {kubernetes.namespace}"
    answer = kubernetes.get(path)
    pairs = [_PAIR]
    if config.storage.root.startswith("minio://"):
        pairs.append(frozenset(KFP_KEYS))
    if not answer.is_good and not answer.is_missing:
        return told(answer, f"secret {KFP_SECRET}", show)
    data = answer.tree.get("data")
    keys = set(data) if isinstance(data, Mapping) else set()
    if any(pair <= keys for pair in pairs):
        return Finding("ok", KFP_SECRET)
    lacking = "is not there" if answer.is_missing else "has no pair of keys for this store"
    said = f"{KFP_SECRET} {lacking}: a role of the service account has to open the store"
    return Finding("warn", said, show)
