"""What is deleted with a job, since the job owns it: its network policy; and what owns the job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.names import NETWORK_POLICIES, JobKind, Tree


def step_pod() -> Tree | None:
    """Return the owner reference to the pod of this step; None outside of one.

    An owner in another namespace does not exist for Kubernetes, which would collect the job.
    """
    name, uid = (os.environ.get(key, "") for key in ("KFP_POD_NAME", "KFP_POD_UID"))
    if not name or not uid:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def isolate(templates: Sequence[Tree]) -> None:
    """Have only a network policy of their own admit to the pods of these templates."""
    for template in templates:
        template["metadata"]["labels"][names.NETWORK] = "job"


def network_policy(kind: JobKind, job: Tree, templates: Sequence[Tree]) -> Tree | None:
    """Return the network policy of a job as the API holds it; None for one that is not isolated.

    Only the pods of the job reach each other, on every port: NCCL takes any. Any pod of the cluster
    reaches the port of the metrics. It is named for this very job: an earlier one's may still be
    there.
    """
    labels = [each.get("metadata", {}).get("labels") or {} for each in templates]
    if not all(names.NETWORK in each for each in labels):
        return None
    metadata = job["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    pods = {"podSelector": {"matchLabels": {kind.label: name}}}
    return {
        "apiVersion": NETWORK_POLICIES.api_version,
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"{name}-{uid[:8]}",
            "labels": own_labels(job),
            "ownerReferences": [kind.owner(job)],
        },
        "spec": {
            **pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [pods]}, *([_SCRAPED] if any(map(_serves, templates)) else [])],
        },
    }


# Prometheus may be in any namespace.
_SCRAPED: Tree = {
    "from": [{"namespaceSelector": {}}],
    "ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}],
}


def _serves(template: Tree) -> bool:
    containers = template["spec"].get("containers") or []
    ports = [port for each in containers for port in each.get("ports") or []]
    return any(port.get("name") == names.METRICS_PORT for port in ports)


def own_labels(job: Tree) -> dict[str, str]:
    """Return the labels of Flotilla that a job has, for what it owns."""
    prefixes = (names.APP, names.RUN, names.MANAGED)
    labels = job["metadata"].get("labels") or {}
    return {key: value for key, value in labels.items() if key.startswith(prefixes)}
