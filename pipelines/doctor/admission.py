"""Whether the namespace admits the job and its pods: each is tried (`dryRun`), and none is made.

Quotas, Pod Security, service accounts, limits and policies give their own answer, in their words.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.parse import quote

from components.kubernetes.names import Tree
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import PLURAL, Answer, Kubernetes, unexpected

_ENFORCED = "pod-security.kubernetes.io/enforce"
_OPERATOR = (
    "kubectl get deployments --all-namespaces --selector control-plane=kubeflow-training-operator"
)
# Of what admission says, in this order; the last one shows the rest.
_REMEDIES = (
    ("PodSecurity", "flotilla doctor --set cluster.kubernetes.pod.security=restricted"),
    ("service account", "kubectl get serviceaccounts --namespace {namespace}"),
    ("quota", "kubectl describe resourcequotas --namespace {namespace}"),
    ("PriorityClass", "kubectl get priorityclasses"),
    (" per ", "kubectl describe limitranges --namespace {namespace}"),
    ("", "kubectl describe namespace {namespace}"),
)


def admits(kubernetes: Kubernetes, manifest: Tree) -> Finding:
    """Try the job, then a pod of each role."""
    where = kubernetes.namespace
    tried = kubernetes.try_to_create(PLURAL, manifest)
    if finding := _judged(kubernetes, tried, "the job"):
        return finding
    level = _level(kubernetes)
    for role, replica in manifest["spec"]["tfReplicaSpecs"].items():
        template = replica["template"]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **template.get("metadata", {}),
                "name": f"{manifest['metadata']['name']}-{role.lower()}-0",
            },
            "spec": {**template["spec"], "restartPolicy": "Never"},
        }
        if finding := _judged(kubernetes, kubernetes.try_to_create("pods", pod), f"a {role} pod"):
            rule = (
                f"; it enforces Pod Security {level}" if level and finding.state == "warn" else ""
            )
            return Finding(finding.state, f"{finding.message}{rule}", finding.remedy)
    enforced = f" (Pod Security {level})" if level else ""
    return Finding("ok", f"{where} admits the job and a pod of each role{enforced}")


def _level(kubernetes: Kubernetes) -> str:
    answer = kubernetes.get(f"/api/v1/namespaces/{quote(kubernetes.namespace)}")
    labels = answer.tree.get("metadata", {}).get("labels") if answer.is_good else None
    return str((labels or {}).get(_ENFORCED, ""))


def _judged(kubernetes: Kubernetes, answer: Answer, what: str) -> Finding | None:
    """Return what is wrong; None where the object would be made, or is there already."""
    words = " ".join(str(answer.tree.get("message") or "").split())
    where = kubernetes.namespace
    if answer.is_good or answer.status == HTTPStatus.CONFLICT:
        return None
    if answer.is_forbidden and " cannot " in words:
        show = f"kubectl auth can-i create pods --namespace {where}"
        return Finding("warn", f"whether {where} admits {what} could not be tried: {words}", show)
    if "does not support dry run" in words:
        show = "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
        return Finding("warn", f"whether {where} admits {what} could not be tried: {words}", show)
    if "failed calling webhook" in words and "training-operator" in words:
        message = f"the training operator does not answer, so that no job can be made: {words}"
        return Finding("fail", message, _OPERATOR)
    refusals = (HTTPStatus.FORBIDDEN, HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
    if answer.status in refusals:
        remedy = next(remedy for part, remedy in _REMEDIES if part in words)
        return Finding("fail", f"{where} refuses {what}: {words}", remedy.format(namespace=where))
    return unexpected(answer, f"whether {where} admits {what}", "kubectl cluster-info")
