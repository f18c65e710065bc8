"""Whether network policies keep everyone but tasks from the port of TensorFlow's servers.

Policies add up: the pods that one of them selects are reached by what any of them admits. That a
cluster enforces its policies cannot be seen in the API.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from urllib.parse import quote

from components.kubernetes.api.rbac import BASE, POLICIES, POLICIES_GROUP
from components.kubernetes.names import Tree
from components.kubernetes.pods.template import PORT
from pipelines.doctor.engines import PlannedJob, TaskRole
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, unexpected

_EVERYWHERE = {"0.0.0.0/0", "::/0"}


def isolated(kubernetes: Kubernetes, job: PlannedJob) -> Finding:
    """Check that a policy selects the pods of every role, and that none admits everyone."""
    namespace = kubernetes.namespace
    show = f"kubectl get {POLICIES} --namespace {namespace} --output yaml"
    answer = kubernetes.get(f"/apis/{POLICIES_GROUP}/v1/namespaces/{quote(namespace)}/{POLICIES}")
    if not answer.is_good:
        return unexpected(answer, f"the network policies of {namespace}", show)
    open_, covering, bare = set(), set(), []
    for role in job.roles:
        labels = {
            **role.template["metadata"]["labels"],
            **job.examined.labels(job.name, role),
        }
        found = [each for each in answer.items if _covers(each["spec"], labels)]
        covering |= {each["metadata"]["name"] for each in found}
        open_ |= {
            f"{each['metadata']['name']} lets {who}"
            for each in found
            for who in [_widest(each["spec"], _ports(role))]
            if who
        }
        if not found:
            bare.append(role.name)
    risk = f"reach port {PORT} of the tasks, and run code as them"
    if bare:
        roles = ", ".join(sorted(bare))
        message = f"no network policy of {namespace} selects {roles}: any pod may {risk}"
        remedy = f"kubectl apply --namespace {namespace} --kustomize {BASE}"
        return Finding("warn", message, remedy)
    if open_:
        return Finding("warn", f"the network policy {', '.join(sorted(open_))} {risk}", show)
    return Finding("ok", f"{', '.join(sorted(covering))}, where the cluster enforces policies")


def _ports(role: TaskRole) -> list[str]:
    """Return the names that the port has in the pods of a role."""
    ports = role.template["spec"]["containers"][0].get("ports", [])
    return [each["name"] for each in ports if each["containerPort"] == PORT and "name" in each]


def _covers(policy: Tree, labels: Mapping[str, str]) -> bool:
    applies = "Ingress" in (policy.get("policyTypes") or ["Ingress"])
    return applies and _selects(policy.get("podSelector") or {}, labels)


def _selects(selector: Tree, labels: Mapping[str, str]) -> bool:
    if not (selector.get("matchLabels") or {}).items() <= labels.items():
        return False
    return all(_meets(each, labels) for each in selector.get("matchExpressions") or [])


def _meets(expression: Tree, labels: Mapping[str, str]) -> bool:
    has, value = expression["key"] in labels, labels.get(expression["key"])
    values = expression.get("values") or []
    return {
        "Exists": has,
        "DoesNotExist": not has,
        "In": value in values,
        "NotIn": not has or value not in values,
    }[expression["operator"]]


def _widest(policy: Tree, names: Collection[str]) -> str:
    """Return whom a policy admits to the port that is more than tasks, or nothing.

    `names` are those of the port in a pod.
    """
    rules = [
        each for each in policy.get("ingress") or [] if _has_port(each.get("ports") or [], names)
    ]
    peers = [each for rule in rules for each in rule.get("from") or [{}]]
    if any(map(_is_everyone, peers)):
        return "everyone"
    is_namespace = any(each == {"podSelector": {}} for each in peers)
    return "every pod of the namespace" if is_namespace else ""


def _is_everyone(peer: Tree) -> bool:
    block = peer.get("ipBlock") or {}
    everywhere = block.get("cidr") in _EVERYWHERE and not block.get("except")
    # Any pod of any namespace.
    any_pod = peer.get("namespaceSelector") == {} and not peer.get("podSelector")
    return not peer or everywhere or any_pod


def _has_port(ports: list[Tree], names: Collection[str]) -> bool:
    return not ports or any(
        each.get("protocol", "TCP") == "TCP"
        and (
            each.get("port") in (None, PORT, *names)
            or (isinstance(each["port"], int) and each["port"] <= PORT <= each.get("endPort", 0))
        )
        for each in ports
    )
