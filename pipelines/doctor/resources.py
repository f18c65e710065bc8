"""Whether the quotas of the namespace have room for all pods of the job at once.

What the pods of a job ask for, role by role, from its manifest.

Whether the nodes have the GPUs that the job requests, under the name of its request.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from kubernetes.utils.quantity import parse_quantity

from components.kubernetes.names import Tree
from pipelines.doctor.engines import PlannedJob
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, unexpected

Amounts = Mapping[str, Decimal]


@dataclass(frozen=True, kw_only=True)
class Role:
    """The pods of one role: what the scheduler sets aside for one, and the most it may use."""

    name: str
    count: int
    requests: Amounts
    limits: Amounts
    pod: Tree


def roles(job: PlannedJob, limit_ranges: Iterable[Tree] = ()) -> list[Role]:
    """Return the roles of a job, with what the LimitRanges of a namespace add to their pods."""
    default_requests, default_limits = _defaults(limit_ranges)
    found = []
    for each in job.roles:
        pod = each.template["spec"]
        resources = pod["containers"][0].get("resources", {})
        limits = resources.get("limits", {})
        # A limit without a request requests as much.
        requests = {**default_requests, **limits, **resources.get("requests", {})}
        found.append(
            Role(
                name=each.name,
                count=each.count,
                requests=_amounts(requests),
                limits=_amounts({**default_limits, **limits}),
                pod=pod,
            )
        )
    return found


def _defaults(limit_ranges: Iterable[Tree]) -> tuple[Tree, Tree]:
    """Return the requests and the limits of containers that name nothing."""
    requests: Tree = {}
    limits: Tree = {}
    for limit_range in limit_ranges:
        for each in limit_range["spec"].get("limits", []):
            if each.get("type") == "Container":
                limits |= each.get("default", {})
                requests |= {**each.get("default", {}), **each.get("defaultRequest", {})}
    return requests, limits


def amount(text: object) -> Decimal:
    """Return the number of a quantity such as `500m` or `2Gi`."""
    return Decimal(parse_quantity(str(text)))


def written(number: Decimal) -> str:
    """Write an amount as Kubernetes reads it: whole, in thousandths, or in binary units."""
    if number != number.to_integral_value():
        return f"{int((number * 1000).to_integral_value(rounding='ROUND_CEILING'))}m"
    whole = int(number)
    for unit, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)


def _amounts(texts: Mapping[str, str]) -> Amounts:
    return {name: amount(text) for name, text in texts.items()}


# A pod that says nothing of these is refused where a quota counts them.
_DEMANDED = ("cpu", "memory")


def room(kubernetes: Kubernetes, job: PlannedJob) -> Finding:
    """Check the job against every `ResourceQuota` and what is used of it."""
    where = kubernetes.namespace
    show = f"kubectl describe resourcequotas --namespace {where}"
    answer = kubernetes.find("resourcequotas")
    if not answer.is_good:
        return unexpected(answer, f"the quotas of {where}", show)
    if not answer.items:
        return Finding("ok", f"{where} has no quota")
    wanted = roles(job, kubernetes.find("limitranges").items)
    objects = _objects(job)
    scoped = [each["metadata"]["name"] for each in answer.items if _is_scoped(each)]
    plain = [each for each in answer.items if not _is_scoped(each)]
    for quota in plain:
        if finding := _exceeded(where, quota, wanted, objects) or _refused(quota, wanted):
            return finding
    if scoped:
        message = f"the quotas {', '.join(scoped)} count some pods only, and were left out"
        return Finding("warn", message, show)
    names = ", ".join(each["metadata"]["name"] for each in plain)
    return Finding("ok", f"room for the job in {names}")


def _is_scoped(quota: Tree) -> bool:
    return bool(quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))


def _exceeded(
    where: str, quota: Tree, wanted: Sequence[Role], objects: Mapping[str, int]
) -> Finding | None:
    name = quota["metadata"]["name"]
    hard, used = _limits(quota), quota.get("status", {}).get("used", {})
    asked = {key: _wanted(key, wanted, objects) for key in hard}
    needed = {key: amount(used.get(key, 0)) + asked[key] for key in hard}
    over = {key: total for key, total in needed.items() if total > amount(hard[key])}
    own = {key: total for key, total in over.items() if asked[key]}
    if not own:
        return None
    message = "; ".join(
        f"{key}: the job requests {written(asked[key])}, {used.get(key, 0)} of {hard[key]} are used"
        for key in own
    )
    patch = json.dumps({"spec": {"hard": {key: written(total) for key, total in own.items()}}})
    remedy = f"kubectl patch resourcequota {name} --namespace {where} --patch {shlex.quote(patch)}"
    return Finding("fail", f"the quota {name} is too small: {message}", remedy)


def _refused(quota: Tree, wanted: Sequence[Role]) -> Finding | None:
    """Return the finding where pods have to name what they do not name."""
    for key in _limits(quota):
        kind, _, resource = key.rpartition(".")
        if resource not in _DEMANDED:
            continue
        side = "limits" if kind == "limits" else "requests"
        silent = [role for role in wanted if resource not in getattr(role, side)]
        if silent:
            names = ", ".join(role.name for role in silent)
            message = (
                f"the quota {quota['metadata']['name']} counts {key}, of which the job says "
                f"nothing for {names}: its pods would be refused"
            )
            setting = f"cluster.kubernetes.pod.resources.{side}.{resource}=AMOUNT"
            return Finding("fail", message, f"flotilla doctor --set {setting}")
    return None


def _limits(quota: Tree) -> dict[str, str]:
    return dict(quota.get("status", {}).get("hard") or quota["spec"].get("hard", {}))


def _objects(job: PlannedJob) -> dict[str, int]:
    """Return how many objects of each kind the job makes, by the names of quotas."""
    resource, tasks = job.examined.kind.resource, sum(each.count for each in job.roles)
    # The lease is the heartbeat of the launcher.
    made = {"pods": tasks, "leases.coordination.k8s.io": 1, **job.examined.counts(tasks)}
    made[f"{resource.plural}.{resource.group}"] = 1
    # Quotas of the oldest kind name these without `count/`.
    short = {key: made[key] for key in ("pods", "services")}
    return {**{f"count/{key}": count for key, count in made.items()}, **short}


def _wanted(key: str, wanted: Sequence[Role], objects: Mapping[str, int]) -> Decimal:
    """Return how much the job requests of what a quota counts as `key`."""
    if key in objects:
        return Decimal(objects[key])
    limited = key.startswith("limits.")
    resource = key.removeprefix("limits.").removeprefix("requests.")
    return sum(
        (
            role.count * (role.limits if limited else role.requests).get(resource, Decimal(0))
            for role in wanted
        ),
        Decimal(0),
    )


# Labels by which the nodes of a pool are known; a pool may have no node until one is needed.
_POOLS = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)


def selected(kubernetes: Kubernetes, job: PlannedJob) -> Finding:
    """Check that nodes have the labels that the pods ask for, and no taint that keeps them off."""
    answer = kubernetes.get("/api/v1/nodes")
    labels = ",".join(sorted({key for role in roles(job) for key in _selector(role)}))
    show = f"kubectl get nodes --label-columns {labels}"
    if not answer.is_good:
        return unexpected(answer, "the nodes", show)
    nodes = answer.items
    for role in roles(job):
        asked = ", ".join(f"{key}={value}" for key, value in _selector(role).items())
        if not asked or any(_takes(node, role) for node in nodes):
            continue
        labelled = [node for node in nodes if _has_labels(node, role)]
        why = (
            "keep it off by taints or are drained"
            if labelled
            else f"have not {asked}{_others(nodes, role)}"
        )
        message = f"no node takes a {role.name} pod: all {len(nodes)} {why}"
        if any(pool in node["metadata"].get("labels", {}) for pool in _POOLS for node in nodes):
            return Finding("warn", f"{message}; an autoscaler may add one", show)
        return Finding("fail", message, show)
    return Finding("ok", "each role has nodes with its labels")


def _selector(role: Role) -> dict[str, str]:
    found: dict[str, str] = role.pod.get("nodeSelector", {})
    return found


def _has_labels(node: Tree, role: Role) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in _selector(role).items())


def _others(nodes: Iterable[Tree], role: Role) -> str:
    """Return the values that nodes have under the same labels."""
    seen = {
        f"{key}={node['metadata']['labels'][key]}"
        for node in nodes
        for key in _selector(role)
        if key in node["metadata"].get("labels", {})
    }
    return f" (but {', '.join(sorted(seen))})" if seen else ""


def devices(job: PlannedJob) -> list[str]:
    """Return the resources of the job that only some nodes have, such as GPUs."""
    return sorted({name for role in roles(job) for name in role.limits if "/" in name})


def present(kubernetes: Kubernetes, job: PlannedJob, resource: str) -> Finding:
    """Check that nodes that take the pods offer enough of a resource; what is in use counts too."""
    wanted = [each for each in roles(job) if each.limits.get(resource)]
    path = ".status.allocatable." + resource.replace(".", "\\.")
    show = f"kubectl get nodes --output 'custom-columns=NAME:.metadata.name,HAS:{path}'"
    answer = kubernetes.get("/api/v1/nodes")
    if not answer.is_good:
        return unexpected(answer, "the nodes", show)
    nodes = [each for each in answer.items if not each.get("spec", {}).get("unschedulable")]
    if not any(_count(node, resource) for node in nodes):
        others = sorted({name for node in nodes for name in _devices_of(node)})
        known = f"they have {', '.join(others)}" if others else "they have no devices at all"
        message = f"no node has {resource} ({known}; one that an autoscaler adds may have it)"
        if len(others) == 1:
            show = f"flotilla doctor --set cluster.kubernetes.gpu_resource={others[0]}"
        return Finding("fail", message, show)
    for role in wanted:
        fitting = [node for node in nodes if _takes(node, role)]
        each = int(role.limits[resource])
        places = sum(_count(node, resource) // each for node in fitting)
        if places < role.count:
            most = max((_count(node, resource) for node in fitting), default=0)
            message = (
                f"{role.count} {role.name} pods ask for {each} {resource} each; the "
                f"{len(fitting)} nodes that take them have room for {places} ({most} on one node "
                "at most)"
            )
            return Finding("fail", message, show)
    total = sum(int(role.limits[resource]) * role.count for role in wanted)
    has = sum(_count(node, resource) for node in nodes)
    if total > has:
        return Finding("fail", f"the job requests {total} {resource}, the nodes have {has}", show)
    return Finding("ok", f"{total} of {has} {resource}; how many of them are free was not counted")


def _takes(node: Tree, role: Role) -> bool:
    spec = node.get("spec", {})
    tainted = spec.get("unschedulable") or any(
        taint.get("effect") in ("NoSchedule", "NoExecute") and not _tolerated(taint, role.pod)
        for taint in spec.get("taints") or ()
    )
    return not tainted and _has_labels(node, role)


def _tolerated(taint: Tree, pod: Tree) -> bool:
    """Say whether a pod may run where a taint is.

    A taint with the name of the resource itself is tolerated by pods that request it
    (`ExtendedResourceToleration`).
    """
    container = pod["containers"][0]
    if taint["key"] in container.get("resources", {}).get("limits", {}):
        return True
    return any(
        each.get("effect") in (None, "", taint["effect"])
        and each.get("key") in (None, "", taint["key"])
        and (each.get("operator") == "Exists" or each.get("value") == taint.get("value"))
        for each in pod.get("tolerations", [])
    )


def _count(node: Tree, resource: str) -> int:
    return int(amount(node.get("status", {}).get("allocatable", {}).get(resource, 0)))


def _devices_of(node: Tree) -> list[str]:
    """Return the names of what a node has more than Kubernetes itself knows of."""
    allocatable = node.get("status", {}).get("allocatable", {})
    return [name for name in allocatable if "/" in name and _count(node, name)]
