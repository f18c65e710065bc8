"""Whether the namespace admits the job and its pods: each is tried (`dryRun`), and none is made.

Quotas, Pod Security, service accounts, limits and policies give their own answer, in their words.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from urllib.parse import quote

from components.kubernetes.api.kinds import PODS
from pipelines.doctor.engines import PlannedJob
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import SHOW, Answer, Kubernetes, unexpected

_ENFORCED = "pod-security.kubernetes.io/enforce"
_UNKNOWN = re.compile(r'unknown field "([^"]+)"')
_SILENT = "failed calling webhook"
# Of what admission says, in this order; the last one shows the rest.
_REMEDIES = (
    ("PodSecurity", "flotilla doctor --set cluster.kubernetes.pod.security=restricted"),
    ("service account", "kubectl get serviceaccounts --namespace {namespace}"),
    ("quota", "kubectl describe resourcequotas --namespace {namespace}"),
    ("PriorityClass", "kubectl get priorityclasses"),
    (" per ", "kubectl describe limitranges --namespace {namespace}"),
    ("", "kubectl describe namespace {namespace}"),
)


def admits(kubernetes: Kubernetes, job: PlannedJob) -> Finding:
    """Try the job, then a pod of each role."""
    where, kind = kubernetes.namespace, job.examined.kind
    strict = job.examined.engine.is_strict
    tried = kubernetes.try_to_create(kind.resource, job.tree, strict=strict)
    if finding := _unmade(job, tried) or _judged(kubernetes, tried, "the job"):
        return finding
    level = _level(kubernetes)
    for role in job.roles:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **role.template.get("metadata", {}),
                "name": f"{job.name}-{role.name.lower()}-0",
            },
            "spec": {**role.template["spec"], "restartPolicy": "Never"},
        }
        answer = kubernetes.try_to_create(PODS, pod)
        if finding := _judged(kubernetes, answer, f"a {role.name} pod"):
            rule = (
                f"; it enforces Pod Security {level}" if level and finding.state == "warn" else ""
            )
            return Finding(finding.state, f"{finding.message}{rule}", finding.remedy)
    enforced = f" (Pod Security {level})" if level else ""
    return Finding("ok", f"{where} admits the job and a pod of each role{enforced}")


def _unmade(job: PlannedJob, answer: Answer) -> Finding | None:
    """Return why no namespace of the cluster would get the job; None where another reason is."""
    examined, words = job.examined, _words(answer)
    if _SILENT in words:
        # A webhook of Kueue has the same name as that of JobSet; its service has not.
        if "kueue" in words:
            message = f"Kueue does not answer, so that no job can be made: {words}"
            return Finding("fail", message, "kubectl get deployments --namespace kueue-system")
        if any(mark in words for mark in examined.webhooks):
            controller = examined.kind.controller
            message = f"the {controller} does not answer, so that no job can be made: {words}"
            return Finding("fail", message, examined.kind.show)
    unknown = _UNKNOWN.findall(words)
    if unknown:
        name, newest = examined.part.name, examined.part.seen[-1]
        message = (
            f"the {name} of this cluster is too old for {', '.join(unknown)}: install {newest}, or "
            "leave the setting out that makes it"
        )
        return Finding("fail", message, examined.install)
    return None


def _level(kubernetes: Kubernetes) -> str:
    answer = kubernetes.get(f"/api/v1/namespaces/{quote(kubernetes.namespace)}")
    labels = answer.tree.get("metadata", {}).get("labels") if answer.is_good else None
    return str((labels or {}).get(_ENFORCED, ""))


def _judged(kubernetes: Kubernetes, answer: Answer, what: str) -> Finding | None:
    """Return what is wrong; None where the object would be made, or is there already."""
    words, where = _words(answer), kubernetes.namespace
    if answer.is_good or answer.status == HTTPStatus.CONFLICT:
        return None
    if answer.is_forbidden and " cannot " in words:
        show = f"kubectl auth can-i create pods --namespace {where}"
        return Finding("warn", f"whether {where} admits {what} could not be tried: {words}", show)
    if "does not support dry run" in words:
        show = "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations"
        return Finding("warn", f"whether {where} admits {what} could not be tried: {words}", show)
    refusals = (HTTPStatus.FORBIDDEN, HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
    if answer.status in refusals:
        remedy = next(remedy for part, remedy in _REMEDIES if part in words)
        return Finding("fail", f"{where} refuses {what}: {words}", remedy.format(namespace=where))
    return unexpected(answer, f"whether {where} admits {what}", SHOW)


def _words(answer: Answer) -> str:
    return " ".join(str(answer.tree.get("message") or "").split())
