"""Owners of Kubernetes objects: the step's pod owns a job, which owns its network policy."""

from __future__ import annotations

import os
from collections.abc import Sequence

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.names import NETWORK_POLICIES, JobKind, Tree


def step_pod() -> Tree | None:
    """Return the owner reference to this step's pod, or None outside a pod.

    Use it only in the pod's namespace, because Kubernetes considers an owner in another namespace
    missing and would delete the job.
    """
    name, uid = (os.environ.get(key, "") for key in ("KFP_POD_NAME", "KFP_POD_UID"))
    if not name or not uid:
        return None
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}


def isolate(templates: Sequence[Tree]) -> None:
    """Label pod templates so that only their job's network policy applies to them."""
    for template in templates:
        template["metadata"]["labels"][names.NETWORK] = "job"


def network_policy(kind: JobKind, job: Tree, templates: Sequence[Tree]) -> Tree | None:
    """Return the network policy of an existing job, or None for a job without isolation.

    The pods of the job can reach each other on every port, because NCCL uses any port. All pods of
    the cluster can reach the metrics port. The name is unique to this job, because the policy of an
    earlier job may still exist.
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


def is_foreign(kind: JobKind, service: Tree) -> bool:
    """Return whether a Service with a job's name is not owned by that job.

    JobSet 0.12 uses any existing Service that has the name of the Service that it would create.
    """
    owners = service["metadata"].get("ownerReferences") or []
    name = service["metadata"]["name"]
    return not any((each.get("kind"), each.get("name")) == (kind.kind, name) for each in owners)


# Prometheus may run in any namespace.
_SCRAPED: Tree = {
    "from": [{"namespaceSelector": {}}],
    "ports": [{"port": names.METRICS_PORT, "protocol": "TCP"}],
}


def _serves(template: Tree) -> bool:
    containers = template["spec"].get("containers") or []
    ports = [port for each in containers for port in each.get("ports") or []]
    return any(port.get("name") == names.METRICS_PORT for port in ports)


def own_labels(job: Tree) -> dict[str, str]:
    """Return a job's Flotilla labels, for the objects that it owns."""
    prefixes = (names.APP, names.RUN, names.MANAGED)
    labels = job["metadata"].get("labels") or {}
    return {key: value for key, value in labels.items() if key.startswith(prefixes)}
