"""Whether network policies keep everyone but tasks from the port of TensorFlow's servers.

Policies add up: the pods that one of them selects are reached by what any of them admits. That a
cluster enforces its policies cannot be seen in the API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from components.kubernetes.api.rbac import BASE, POLICIES, POLICIES_GROUP
from components.kubernetes.names import INDEX_LABELS, ROLE_LABELS, Tree
from components.kubernetes.pods.template import PORT
from components.tfjob.manifest import KIND, PORT_NAME
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, unexpected

_EVERYWHERE = {"0.0.0.0/0", "::/0"}


def isolated(kubernetes: Kubernetes, manifest: Tree) -> Finding:
    """Check that a policy selects the pods of every role, and that none admits everyone."""
    namespace = kubernetes.namespace
    show = f"kubectl get {POLICIES} --namespace {namespace} --output yaml"
    answer = kubernetes.get(f"/apis/{POLICIES_GROUP}/v1/namespaces/{quote(namespace)}/{POLICIES}")
    if not answer.is_good:
        return unexpected(answer, f"the network policies of {namespace}", show)
    open_, covering, bare = set(), set(), []
    for role, labels in _labels(manifest):
        found = [each for each in answer.items if _covers(each["spec"], labels)]
        covering |= {each["metadata"]["name"] for each in found}
        open_ |= {
            f"{each['metadata']['name']} lets {who}"
            for each in found
            for who in [_widest(each["spec"])]
            if who
        }
        if not found:
            bare.append(role)
    risk = f"reach port {PORT} of the tasks, and run code as them"
    if bare:
        roles = ", ".join(sorted(bare))
        message = f"no network policy of {namespace} selects {roles}: any pod may {risk}"
        remedy = f"kubectl apply --namespace {namespace} --kustomize {BASE}"
        return Finding("warn", message, remedy)
    if open_:
        return Finding("warn", f"the network policy {', '.join(sorted(open_))} {risk}", show)
    return Finding("ok", f"{', '.join(sorted(covering))}, where the cluster enforces policies")


def _labels(manifest: Tree) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the labels that the pods of each role have, those of the operator too."""
    for role, replica in manifest["spec"]["tfReplicaSpecs"].items():
        own = {
            KIND.label: manifest["metadata"]["name"],
            ROLE_LABELS[0]: role.lower(),
            INDEX_LABELS[0]: "0",
        }
        yield role, {**replica["template"]["metadata"]["labels"], **own}


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


def _widest(policy: Tree) -> str:
    """Return whom a policy admits to the port that is more than tasks, or nothing."""
    rules = [each for each in policy.get("ingress") or [] if _has_port(each.get("ports") or [])]
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


def _has_port(ports: list[Tree]) -> bool:
    return not ports or any(
        each.get("protocol", "TCP") == "TCP"
        and (
            each.get("port") in (None, PORT, PORT_NAME)
            or (isinstance(each["port"], int) and each["port"] <= PORT <= each.get("endPort", 0))
        )
        for each in ports
    )
