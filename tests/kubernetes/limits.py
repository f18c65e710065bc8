"""Namespace limits on pods (service accounts and quotas), with the messages of Kubernetes 1.33."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

Tree = dict[str, Any]
# Kinds whose number a quota can limit, with their API groups.
GROUPS = {"tfjobs": "kubeflow.org", "jobsets": "jobset.x-k8s.io", "jobs": "batch"}


def excess(
    pod: Tree, namespace: str, accounts: set[str], quotas: list[Tree], pods: list[Tree]
) -> str:
    """Return why a pod is rejected, or an empty string if it is accepted."""
    account = pod.get("spec", {}).get("serviceAccountName", "default")
    reasons = [text for quota in quotas for text in _exceeded(quota, pod, pods)]
    if account not in accounts | {"default"}:
        looked = f"error looking up service account {namespace}/{account}"
        reasons.insert(0, f'{looked}: serviceaccount "{account}" not found')
    name = pod["metadata"].get("name", "")
    if account not in accounts | {"default"}:
        # The service account is checked before the pod's name is generated.
        name = pod["metadata"].get("generateName", name)
    return f'pods "{name}" is forbidden: {reasons[0]}' if reasons else ""


def too_many(kind: str, tree: Tree, quotas: list[Tree], count: int) -> str:
    """Return why one more object of a kind is rejected, or an empty string if it is accepted."""
    group = GROUPS.get(kind)
    resource = f"{kind}.{group}" if group else kind
    key = f"count/{resource}"
    for quota in quotas:
        limit = quota["spec"].get("hard", {}).get(key)
        if limit is not None and count + 1 > int(limit):
            name = tree["metadata"]["name"]
            return (
                f'{resource} "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, '
                f"requested: {key}=1, used: {key}={count}, limited: {key}={limit}"
            )
    return ""


def _exceeded(quota: Tree, pod: Tree, pods: list[Tree]) -> Iterator[str]:
    if quota["spec"].get("scopes"):
        return
    name, hard = quota["metadata"]["name"], quota["spec"].get("hard", {})
    for key, limit in hard.items():
        asked = _asked(key, pod)
        if asked is None:
            yield f"failed quota: {name}: must specify {key} for: tensorflow"
            continue
        used = parse_quantity(str(quota.get("status", {}).get("used", {}).get(key, 0)))
        used += sum(_asked(key, each) or 0 for each in pods)
        if asked and used + asked > parse_quantity(str(limit)):
            yield (
                f"exceeded quota: {name}, requested: {key}={asked}, used: {key}={used}, "
                f"limited: {key}={limit}"
            )


def _asked(key: str, pod: Tree) -> Decimal | None:
    """Return the amount that a pod requests, or None if a required request is missing."""
    if key in ("pods", "count/pods"):
        return Decimal(1)
    side = "limits" if key.startswith("limits.") else "requests"
    resource = key.removeprefix("limits.").removeprefix("requests.")
    containers = pod.get("spec", {}).get("containers") or [{}]
    resources = containers[0].get("resources", {})
    amounts = {**resources.get("limits", {}), **resources.get(side, {})}
    if resource in amounts:
        return Decimal(parse_quantity(str(amounts[resource])))
    return None if resource in ("cpu", "memory") else Decimal(0)
