"""Checks of permissions, and of the admission of the job and its pods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import quote

from flotilla.components.kubernetes.client import RefusedError, SilentControllerError
from flotilla.components.kubernetes.names import PODS, JobKind, Tree
from flotilla.components.kubernetes.requirements import (
    FILE,
    LAUNCHER,
    Permission,
    find_user,
    format_grant,
    may,
    required_rules,
)
from flotilla.pipelines.doctor.cluster import CONTROLLERS, Cluster, PlannedJob
from flotilla.pipelines.doctor.examination import Finding
from flotilla.trainer.runtime.errors import ConfigError


@dataclass(frozen=True)
class Account:
    """A service account."""

    namespace: str
    name: str

    @property
    def user(self) -> str:
        """The user name of the account in the API."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


def check_user(cluster: Cluster, kind: JobKind) -> Finding:
    """Check that the caller may launch a job."""
    where, user = cluster.namespace, find_user(cluster.api)
    try:
        found = {each: may(cluster.api, each, where) for each in required_rules(LAUNCHER, kind)}
    except RefusedError as error:
        message = f"the API does not report what {user} may do: {error}"
        return Finding("fail", message, f"kubectl auth can-i --list --namespace {where}")
    return _judge_permissions(where, user, LAUNCHER, found)


def check_account(cluster: Cluster, account: Account, role: str, kind: JobKind) -> Finding:
    """Check that a service account has the permissions of a role in deploy/base/rbac.yaml."""
    where, wanted = cluster.namespace, required_rules(role, kind)
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.namespace}"]
    subject = {"user": account.user, "groups": [*groups, "system:authenticated"]}
    try:
        found = {each: may(cluster.api, each, where, subject) for each in wanted}
    except RefusedError as error:
        message = f"cannot check what {account.user} may do ({error}); check each permission"
        show = f"kubectl auth can-i {wanted[0]} --namespace {where} --as {account.user}"
        return Finding("warn", message, show)
    return _judge_permissions(where, account.user, role, found)


def _judge_permissions(
    where: str, user: str, role: str, found: Mapping[Permission, bool]
) -> Finding:
    missing = [permission for permission, allowed in found.items() if not allowed]
    if not missing:
        return Finding("ok", f"{user} has all permissions of {role} ({FILE}) in {where}")
    fatal = any(not permission.is_optional for permission in missing)
    message = f"{user} lacks permissions in {where}: {', '.join(map(str, missing))}"
    return Finding("fail" if fatal else "warn", message, format_grant(where, user, role))


# Default service account of single-user KFP. In multi-user mode, it is `default-editor`.
USUAL = "pipeline-runner"


def parse_account(text: str, namespace: str) -> Account:
    """Return the account given as `[NAMESPACE:]NAME`, or the default account if it is empty."""
    place, _, name = text.rpartition(":")
    return Account(place or namespace, name or USUAL)


def check_name(text: str) -> None:
    """Raise a `ConfigError` unless the text has the form `[NAMESPACE:]NAME`."""
    parts = text.split(":")
    if text and (len(parts) > 2 or not all(part and part == quote(part, "") for part in parts)):  # noqa: PLR2004
        raise ConfigError(f"--service-account {text!r}: use the form NAME or NAMESPACE:NAME")


def check_ui_account(cluster: Cluster, account: Account) -> Finding:
    """Check that the account of runs started from the KFP UI exists, and report its name."""
    message = f"runs started from the KFP UI use {account.user}"
    place = f"/api/v1/namespaces/{account.namespace}/serviceaccounts/{account.name}"
    try:
        cluster.api.read(place)
    except RefusedError as error:
        if not error.is_missing:
            raise
        message += ", which does not exist: correct --service-account NAMESPACE:NAME"
        show = f"kubectl get serviceaccounts --namespace {account.namespace}"
        return Finding("fail", message, show)
    return Finding("ok", message)


# Parts of a refusal message, each with the command that shows more. The first match applies.
_REMEDIES = (
    ("PodSecurity", "flotilla doctor --set cluster.kubernetes.pod.security=restricted"),
    ("service account", "kubectl get serviceaccounts --namespace {namespace}"),
    ("quota", "kubectl describe resourcequotas --namespace {namespace}"),
    ("PriorityClass", "kubectl get priorityclasses"),
    (" per ", "kubectl describe limitranges --namespace {namespace}"),
    ("", "kubectl describe namespace {namespace}"),
)


def admits(cluster: Cluster, job: PlannedJob) -> Finding:
    """Dry-run the creation of the job, then of a pod of each role."""
    kind, strict = job.engine.kind, job.engine.is_strict
    create = partial(cluster.api.create, is_tried=True)
    try:
        made = partial(create, kind.resource, job.tree, strict=strict)
        if finding := _try_create(cluster, job, "the job", made):
            return finding
    except SilentControllerError as error:
        message = f"the {kind.controller} does not respond, so no job can be created: {error}"
        return Finding("fail", message, kind.show)
    for role in job.roles:
        metadata = {**role.template.get("metadata", {}), "name": f"{job.name}-{role.name}-0"}
        spec = {**role.pod, "restartPolicy": "Never"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        if finding := _try_create(cluster, job, f"a {role.name} pod", partial(create, PODS, pod)):
            return finding
    return Finding("ok", f"the namespace {cluster.namespace} admits the job and a pod of each role")


def _try_create(
    cluster: Cluster, job: PlannedJob, what: str, create: Callable[[], Tree]
) -> Finding | None:
    """Return a finding if creation would be refused. An existing object is not an error."""
    where, place = cluster.namespace, f"the namespace {cluster.namespace}"
    try:
        create()
    except RefusedError as error:
        words = str(error).partition(": ")[2]
        if error.code == HTTPStatus.CONFLICT:
            return None
        if error.is_of_unknown_fields:
            controller = CONTROLLERS[job.engine.name]
            message = (
                f"the {controller.part.name} of this cluster does not know a field of the job: "
                f"{words}; install {controller.part.seen[-1]}, or remove the setting of that field"
            )
            return Finding("fail", message, controller.install)
        if (error.is_forbidden and " cannot " in words) or "does not support dry run" in words:
            show = f"kubectl auth can-i create pods --namespace {where}"
            return Finding("warn", f"cannot determine whether {place} admits {what}: {words}", show)
        remedy = next(remedy for part, remedy in _REMEDIES if part in words)
        return Finding("fail", f"{place} refuses {what}: {words}", remedy.format(namespace=where))
    return None
