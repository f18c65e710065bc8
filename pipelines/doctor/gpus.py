"""Whether the nodes have the GPUs that the job asks for, under the name by which it asks."""

from __future__ import annotations

from collections.abc import Iterable

from pipelines.doctor.finding import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, told
from pipelines.doctor.requested import Role, Tree, amount, roles


def devices(manifest: Tree) -> list[str]:
    """Return the resources of the job that only some nodes have, such as GPUs."""
    return sorted({name for role in roles(manifest) for name in role.limits if "/" in name})


def present(kubernetes: Kubernetes, manifest: Tree, resource: str) -> Finding:
    """Check that nodes that take the pods offer enough of a resource; what is in use counts too."""
    wanted = [each for each in roles(manifest) if each.limits.get(resource)]
    show = f"kubectl get nodes --output 'custom-columns=NAME:.metadata.name,HAS:{_path(resource)}'"
    answer = kubernetes.get("/api/v1/nodes")
    if not answer.is_good:
        return told(answer, "the nodes", show)
    nodes = [each for each in answer.items if not each.get("spec", {}).get("unschedulable")]
    if not any(_count(node, resource) for node in nodes):
        others = sorted({name for node in nodes for name in _devices_of(node)})
        known = f"they have {', '.join(others)}" if others else "they have no devices at all"
        said = f"no node has {resource} ({known}; one that an autoscaler adds may have it)"
        if len(others) == 1:
            show = f"flotilla doctor --set cluster.kubernetes.gpu_resource={others[0]}"
        return Finding("fail", said, show)
    for role in wanted:
        fitting = [node for node in nodes if _takes(node, role)]
        each = int(role.limits[resource])
        places = sum(_count(node, resource) // each for node in fitting)
        if places < role.count:
            most = max((_count(node, resource) for node in fitting), default=0)
            said = (
                f"{role.count} {role.name} pods ask for {each} {resource} each; the "
                f"{len(fitting)} nodes that take them have room for {places} ({most} on one node "
                "at most)"
            )
            return Finding("fail", said, show)
    total = sum(int(role.limits[resource]) * role.count for role in wanted)
    has = sum(_count(node, resource) for node in nodes)
    if total > has:
        return Finding("fail", f"the job asks for {total} {resource}, the nodes have {has}", show)
    return Finding("ok", f"{total} of {has} {resource}; how many of them are free was not counted")


def _takes(node: Tree, role: Role) -> bool:
    labels = node["metadata"].get("labels", {})
    selector = role.pod.get("nodeSelector", {})
    tainted = any(not _tolerated(taint, role.pod) for taint in _taints(node))
    return not tainted and all(labels.get(key) == value for key, value in selector.items())


def _taints(node: Tree) -> Iterable[Tree]:
    found = node.get("spec", {}).get("taints") or []
    return [taint for taint in found if taint.get("effect") in ("NoSchedule", "NoExecute")]


def _tolerated(taint: Tree, pod: Tree) -> bool:
    """Say whether a pod may run where a taint is.

    A taint that is called as the resource itself is tolerated by whoever asks for it
    (`ExtendedResourceToleration`).
    """
    container = pod["containers"][0]
    if taint["key"] in container.get("resources", {}).get("limits", {}):
        return True
    for each in pod.get("tolerations", []):
        same_effect = each.get("effect") in (None, "", taint["effect"])
        same_key = each.get("key") in (None, "", taint["key"])
        any_value = each.get("operator") == "Exists"
        if same_effect and same_key and (any_value or each.get("value") == taint.get("value")):
            return True
    return False


def _count(node: Tree, resource: str) -> int:
    return int(amount(node.get("status", {}).get("allocatable", {}).get(resource, 0)))


def _devices_of(node: Tree) -> list[str]:
    """Return the names of what a node has more than Kubernetes itself knows of."""
    allocatable = node.get("status", {}).get("allocatable", {})
    return [name for name in allocatable if "/" in name and _count(node, name)]


def _path(resource: str) -> str:
    return ".status.allocatable." + resource.replace(".", "\\.")
