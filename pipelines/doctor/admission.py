"""Whether the namespace admits the job and its pods: each is tried by a dry run, none is made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http import HTTPStatus

from components.kubernetes.api.client import RefusedError, SilentControllerError
from components.kubernetes.api.kinds import PODS
from components.kubernetes.names import Tree
from pipelines.doctor.cluster import CONTROLLERS, Cluster, PlannedJob, Role
from pipelines.doctor.examination import Finding

# Of what admission says, in this order; the last one shows the rest.
_REMEDIES = (
    ("PodSecurity", "flotilla doctor --set cluster.kubernetes.pod.security=restricted"),
    ("service account", "kubectl get serviceaccounts --namespace {namespace}"),
    ("quota", "kubectl describe resourcequotas --namespace {namespace}"),
    ("PriorityClass", "kubectl get priorityclasses"),
    (" per ", "kubectl describe limitranges --namespace {namespace}"),
    ("", "kubectl describe namespace {namespace}"),
)


def admits(cluster: Cluster, job: PlannedJob) -> Finding:
    """Try the job, then a pod of each role."""
    kind, strict = job.engine.kind, job.engine.is_strict
    create = partial(cluster.api.create, is_tried=True)
    try:
        made = partial(create, kind.resource, job.tree, strict=strict)
        if finding := _refused(cluster, job, "the job", made):
            return finding
    except SilentControllerError as error:
        message = f"the {kind.controller} does not answer, so that no job can be made: {error}"
        return Finding("fail", message, kind.show)
    for role in job.roles:
        pod = _pod(job, role)
        if finding := _refused(cluster, job, f"a {role.name} pod", partial(create, PODS, pod)):
            return finding
    return Finding("ok", f"{cluster.namespace} admits the job and a pod of each role")


def _pod(job: PlannedJob, role: Role) -> Tree:
    metadata = {**role.template.get("metadata", {}), "name": f"{job.name}-{role.name}-0"}
    spec = {**role.pod, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _refused(
    cluster: Cluster, job: PlannedJob, what: str, create: Callable[[], Tree]
) -> Finding | None:
    """Return why it is refused; None where it would be made, or is there already."""
    where = cluster.namespace
    try:
        create()
    except RefusedError as error:
        words = str(error).partition(": ")[2]
        if error.code == HTTPStatus.CONFLICT:
            return None
        if error.is_of_unknown_fields:
            controller = CONTROLLERS[job.engine.name]
            message = (
                f"the {controller.part.name} of this cluster is too old: install "
                f"{controller.part.seen[-1]}, or leave the setting out that makes the field: "
                f"{words}"
            )
            return Finding("fail", message, controller.install)
        if (error.is_forbidden and " cannot " in words) or "does not support dry run" in words:
            show = f"kubectl auth can-i create pods --namespace {where}"
            return Finding("warn", f"whether {where} admits {what} is not known: {words}", show)
        remedy = next(remedy for part, remedy in _REMEDIES if part in words)
        return Finding("fail", f"{where} refuses {what}: {words}", remedy.format(namespace=where))
    return None
