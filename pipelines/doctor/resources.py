"""Checks that quotas allow all pods of the job, and that nodes have enough GPUs for the pods."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from flotilla.components.kubernetes.names import Tree
from flotilla.pipelines.doctor.cluster import NODES, Cluster, PlannedJob, Role
from flotilla.pipelines.doctor.examination import Finding


def amount(text: object) -> Decimal:
    """Return the number that a quantity such as `500m` or `2Gi` stands for."""
    return Decimal(parse_quantity(str(text)))


def format_quantity(number: Decimal) -> str:
    """Format a number as a Kubernetes quantity, such as `3`, `500m` or `2Gi`."""
    if number != number.to_integral_value():
        return f"{int((number * 1000).to_integral_value(rounding='ROUND_CEILING'))}m"
    whole = int(number)
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)


def room(cluster: Cluster, job: PlannedJob, *, has_step: bool = True) -> Finding:
    """Check that the requests of all pods fit into the rest of every unscoped `ResourceQuota`.

    `has_step` tells whether the step that creates the job runs in this namespace, so that its pod
    also counts.
    """
    where = cluster.namespace
    quotas = cluster.api.read(f"/api/v1/namespaces/{where}/resourcequotas")["items"]
    if not quotas:
        return Finding("ok", f"the namespace {where} has no quota")
    scoped = [each["metadata"]["name"] for each in quotas if _is_scoped(each)]
    plain = [each for each in quotas if not _is_scoped(each)]
    for quota in plain:
        if finding := _exceeded(where, quota, job, int(has_step)):
            return finding
    if scoped:
        message = f"the quotas {', '.join(scoped)} apply only to some pods; this check ignores them"
        return Finding("warn", message, f"kubectl describe resourcequotas --namespace {where}")
    names = ", ".join(each["metadata"]["name"] for each in plain)
    return Finding("ok", f"there is room for the job in {names}")


def _is_scoped(quota: Tree) -> bool:
    return bool(quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))


def _exceeded(where: str, quota: Tree, job: PlannedJob, steps: int) -> Finding | None:
    name, objects = quota["metadata"]["name"], _objects(job, steps)
    hard = dict(quota.get("status", {}).get("hard") or quota["spec"].get("hard", {}))
    used = quota.get("status", {}).get("used", {})
    asked = {key: _count_requested(key, job, objects) for key in hard}
    needed = {key: amount(used.get(key, 0)) + asked[key] for key in hard if asked[key]}
    over = {key: total for key, total in needed.items() if total > amount(hard[key])}
    if not over:
        return None
    message = "; ".join(
        f"{key}: the job {'and its step request' if _is_of_pods(key) and steps else 'requests'} "
        f"{format_quantity(asked[key])}, and {used.get(key, 0)} of {hard[key]} are already used"
        for key in over
    )
    patch = json.dumps(
        {"spec": {"hard": {key: format_quantity(total) for key, total in over.items()}}}
    )
    remedy = f"kubectl patch resourcequota {name} --namespace {where} --patch {shlex.quote(patch)}"
    return Finding("fail", f"the quota {name} is too small: {message}", remedy)


def _is_of_pods(key: str) -> bool:
    return key.removeprefix("count/") == "pods"


def _objects(job: PlannedJob, steps: int) -> dict[str, int]:
    """Return the number of objects that the job and its step create, keyed by quota resource."""
    kind, tasks = job.engine.kind, sum(each.count for each in job.roles)
    # Count a lease, in which the launcher stores its heartbeat.
    made = {"pods": tasks + steps, "leases.coordination.k8s.io": 1}
    made[f"{kind.resource.plural}.{kind.resource.group}"] = 1
    # Child Jobs share one headless service. The training operator creates a service for every pod.
    made |= {"services": 1, "jobs.batch": tasks} if kind.has_child_jobs else {"services": tasks}
    # Add the older names of two quotas, which have no prefix `count/`.
    short = {key: made[key] for key in ("pods", "services")}
    return {**{f"count/{key}": count for key, count in made.items()}, **short}


def _count_requested(key: str, job: PlannedJob, objects: Mapping[str, int]) -> Decimal:
    if key in objects:
        return Decimal(objects[key])
    resource = key.removeprefix("limits.").removeprefix("requests.")
    each = (role.count * _read_request(role, key, resource) for role in job.roles)
    return sum(each, Decimal(0))


def _read_request(role: Role, key: str, resource: str) -> Decimal:
    every = [*role.pod.get("initContainers", []), *role.pod["containers"]]
    amounts = (_of_container(each.get("resources", {}), key, resource) for each in every)
    return sum(amounts, Decimal(0))


def _of_container(resources: Tree, key: str, resource: str) -> Decimal:
    limits = resources.get("limits", {})
    # Without a request, Kubernetes uses the limit as the request.
    asked = limits if key.startswith("limits.") else {**limits, **resources.get("requests", {})}
    return amount(asked.get(resource, 0))


def devices(job: PlannedJob) -> list[str]:
    """Return the resources of the job that only some nodes have, such as GPUs."""
    limits = [role.resources.get("limits", {}) for role in job.roles]
    return sorted({name for each in limits for name in each if "/" in name})


def present(cluster: Cluster, job: PlannedJob, resource: str) -> Finding:
    """Check that suitable nodes have enough of a resource, whether or not it is in use."""
    path = ".status.allocatable." + resource.replace(".", "\\.")
    show = f"kubectl get nodes --output 'custom-columns=NAME:.metadata.name,HAS:{path}'"
    nodes = cluster.api.read(NODES)["items"]
    if not any(_count(node, resource) for node in nodes):
        others = sorted({name for node in nodes for name in _list_devices(node)})
        known = f"the nodes have {', '.join(others)}" if others else "the nodes have no devices"
        message = f"no node has {resource}; {known}; a node that an autoscaler adds may have it"
        if len(others) == 1:
            show = f"flotilla doctor --set cluster.kubernetes.gpu_resource={others[0]}"
        return Finding("fail", message, show)
    total = 0
    for role in job.roles:
        each = int(role.resources.get("limits", {}).get(resource, 0))
        if not each:
            continue
        fitting = [_count(node, resource) for node in nodes if _takes(node, role)]
        places = sum(has // each for has in fitting)
        if places < role.count:
            message = (
                f"{role.count} {role.name} pods request {each} {resource} each; the {len(fitting)} "
                f"nodes that accept them have room for {places} (one node has at most "
                f"{max(fitting, default=0)})"
            )
            return Finding("fail", message, show)
        total += each * role.count
    has = sum(_count(node, resource) for node in nodes)
    if total > has:
        message = f"the job requests {total} {resource}, but the nodes have {has}"
        return Finding("fail", message, show)
    message = f"the job requests {total} of {has} {resource}; other pods may use some of them"
    return Finding("ok", message)


def _takes(node: Tree, role: Role) -> bool:
    labels = node["metadata"].get("labels", {})
    taints = node.get("spec", {}).get("taints") or ()
    return not any(
        taint.get("effect") in ("NoSchedule", "NoExecute") and not _is_tolerated(taint, role)
        for taint in taints
    ) and all(labels.get(k) == value for k, value in role.pod.get("nodeSelector", {}).items())


def _is_tolerated(taint: Tree, role: Role) -> bool:
    """Return whether a pod tolerates a taint, possibly through `ExtendedResourceToleration`."""
    if taint["key"] in role.resources.get("limits", {}):
        return True
    return any(
        each.get("effect") in (None, "", taint["effect"])
        and each.get("key") in (None, "", taint["key"])
        and (each.get("operator") == "Exists" or each.get("value") == taint.get("value"))
        for each in role.pod.get("tolerations", [])
    )


def _count(node: Tree, resource: str) -> int:
    """Return the amount of a resource that a node offers. A cordoned node offers 0."""
    if node.get("spec", {}).get("unschedulable"):
        return 0
    return int(amount(node.get("status", {}).get("allocatable", {}).get(resource, 0)))


def _list_devices(node: Tree) -> list[str]:
    allocatable = node.get("status", {}).get("allocatable", {})
    return [name for name in allocatable if "/" in name and _count(node, name)]
