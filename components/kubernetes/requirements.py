"""What Flotilla needs from a cluster: permissions, and native sidecars for a user's program.

`deploy/base/rbac.yaml` grants the permissions. The launcher checks them before it creates a job.
Without the permissions on leases, the guard of the leading task would mistake a healthy job for an
orphan. Native sidecars (Kubernetes 1.29, KEP-753) are init containers that keep running. An older
API server drops the field that marks them, and then the user's program never starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.components.kubernetes.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.names import JobKind, Tree
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError, UserError

BASE = "deploy/base"
FILE = f"{BASE}/rbac.yaml"
LAUNCHER, TRAINER = "flotilla-launcher", "flotilla-trainer"
REVIEWS = "/apis/authorization.k8s.io/v1"
# The oldest version of Kubernetes with native sidecars.
OLDEST = (1, 29)
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


@dataclass(frozen=True)
class Permission:
    """The permission for a verb on a kind of object. A run also works without an optional one."""

    verb: str
    resource: str
    group: str = ""
    is_optional: bool = False

    def __str__(self) -> str:
        """Format the permission for `kubectl auth can-i`."""
        resource, _, part = self.resource.partition("/")
        named = f"{resource}.{self.group}" if self.group else resource
        return f"{self.verb} {named}" + (f"/{part}" if part else "")

    def attributes(self, namespace: str) -> Tree:
        """Return the permission as the `resourceAttributes` of an access review."""
        resource, _, part = self.resource.partition("/")
        named = {"verb": self.verb, "group": self.group, "resource": resource}
        return {"namespace": namespace, **named, **({"subresource": part} if part else {})}


# Without this permission, tasks of other Flotilla jobs in the namespace can reach the job.
ISOLATION = Permission("create", "networkpolicies", "networking.k8s.io", is_optional=True)


def required_rules(role: str, kind: JobKind) -> tuple[Permission, ...]:
    """Return the permissions that a role needs for this kind of job."""
    jobs = (kind.resource.plural, kind.resource.group)
    leases = ("leases", "coordination.k8s.io")
    if role == TRAINER:
        # Without these permissions, an abandoned job runs until its deadline, and a canceled job
        # may end without a last checkpoint.
        return (
            *_permissions("delete", *jobs, is_optional=True),
            *_permissions("get list watch", *leases, is_optional=True),
        )
    # The launcher deletes the child Job of a lost pod, so that the controller recreates it
    # immediately. It reads Services to detect one of another owner in advance.
    of_child_jobs = (
        *_permissions("delete list", "jobs", "batch", is_optional=True),
        *_permissions("get", "services", is_optional=True),
    )
    return (
        *_permissions("create delete get list patch watch", *jobs),
        *_permissions("create get patch", *leases),
        *_permissions("get list watch", "pods"),
        *_permissions("get", "pods/log"),
        *(of_child_jobs if kind.has_child_jobs else ()),
        # Without this permission, failure reports contain no events.
        *_permissions("list", "events", is_optional=True),
        ISOLATION,
    )


def _permissions(
    verbs: str, resource: str, group: str = "", *, is_optional: bool = False
) -> tuple[Permission, ...]:
    return tuple(Permission(verb, resource, group, is_optional) for verb in verbs.split())


def require_permissions(api: Api, namespace: str, kind: JobKind) -> None:
    """Raise a `UserError` if permissions are missing. Do nothing if the API cannot review them."""
    asked = [each for each in required_rules(LAUNCHER, kind) if not each.is_optional]
    try:
        missing = [each for each in asked if not may(api, each, namespace)]
        if not missing:
            return
        user = find_user(api)
    except (RefusedError, UnreachableError):
        return
    raise UserError(refusal(missing, user, namespace))


def may_isolate(api: Api, namespace: str) -> bool:
    """Return whether the launcher may create network policies, or False if this is unknown."""
    try:
        return may(api, ISOLATION, namespace)
    except (RefusedError, UnreachableError):
        return False


def refusal(missing: Sequence[Permission], user: str, namespace: str) -> str:
    """Return the message about missing permissions, with the commands that grant them."""
    return (
        f"{user} lacks permissions in the namespace {namespace}: {', '.join(map(str, missing))}; "
        f"to grant them, run: {format_grant(namespace, user, LAUNCHER)}"
    )


def format_grant(namespace: str, user: str, role: str) -> str:
    """Return the commands that create a role and bind it to a user."""
    if user.startswith("system:serviceaccount:"):
        *_, its_namespace, name = user.split(":")
        subject = f"--serviceaccount {its_namespace}:{name}"
    else:
        name = "user"
        subject = f"--user '{user or 'USER'}'"
    return (
        f"kubectl apply --namespace {namespace} --kustomize {BASE} && kubectl create rolebinding "
        f"{role}-{name} --namespace {namespace} --role {role} {subject}"
    )


def find_user(api: Api) -> str:
    """Return the API's user name for this process, or `this user` if it is unknown."""
    try:
        answer = api.post(WHO, _body("authentication", "SelfSubjectReview"))
    except RefusedError:
        return "this user"
    return str(answer.get("status", {}).get("userInfo", {}).get("username") or "this user")


def may(
    api: Api, permission: Permission, namespace: str, subject: Mapping[str, Any] | None = None
) -> bool:
    """Return whether this user, or a `subject` with `user` and `groups`, has a permission."""
    kind = "SubjectAccessReview" if subject else "SelfSubjectAccessReview"
    body = _body("authorization", kind)
    body["spec"] = {"resourceAttributes": permission.attributes(namespace), **(subject or {})}
    answer = api.post(f"{REVIEWS}/{kind.lower()}s", body)
    return bool(answer["status"]["allowed"])


def _body(group: str, kind: str) -> Tree:
    return {"apiVersion": f"{group}.k8s.io/v1", "kind": kind}


def needs_sidecars(config: Config) -> bool:
    """Return whether the pods of a run have an agent next to the user's program."""
    return bool(config.program.command and config.program.python)


def describe_lack(version: str) -> str:
    """Return why this Kubernetes version cannot run a program, or "" if it can or is unknown."""
    found = _VERSION.match(version)
    if not found or (int(found[1]), int(found[2])) >= OLDEST:
        return ""
    oldest = ".".join(map(str, OLDEST))
    return (
        f"program.command: Flotilla's agent needs native sidecars, which Kubernetes "
        f"{found[1]}.{found[2]} does not have: update Kubernetes to {oldest} or later, or set "
        "program.python to an empty string to run without the agent"
    )


def require_sidecars(api: Api, config: Config) -> None:
    """Raise a `ConfigError` if the cluster is too old for the run's program."""
    if not needs_sidecars(config):
        return
    try:
        version = str(api.read("/version").get("gitVersion", ""))
    except RefusedError:
        # Assume that the version is new enough if the caller lacks the permission to read it.
        return
    if lack := describe_lack(version):
        raise ConfigError(lack)
