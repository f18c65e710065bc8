"""Whether the permissions of the launcher, and of the guard of the leading task, are granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from components.kubernetes.api import rbac
from components.kubernetes.api.client import RefusedError
from components.kubernetes.api.kinds import JobKind
from components.kubernetes.api.rbac import FILE, LAUNCHER, Permission, granting, needed
from pipelines.doctor.cluster import Cluster
from pipelines.doctor.examination import Finding
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Account:
    """A service account."""

    namespace: str
    name: str

    @property
    def user(self) -> str:
        """Return the name as which it is known to the API."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


def of_this_user(cluster: Cluster, kind: JobKind) -> Finding:
    """Check that the caller may launch a job."""
    where, user = cluster.namespace, rbac.user_of(cluster.api)
    try:
        found = {each: rbac.may(cluster.api, each, where) for each in needed(LAUNCHER, kind)}
    except RefusedError as error:
        message = f"the API does not say what {user} may do: {error}"
        return Finding("fail", message, f"kubectl auth can-i --list --namespace {where}")
    return _judged(where, user, LAUNCHER, found)


def of_account(cluster: Cluster, account: Account, role: str, kind: JobKind) -> Finding:
    """Check that a service account has what a role of deploy/base/rbac.yaml grants."""
    where, wanted = cluster.namespace, needed(role, kind)
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.namespace}"]
    subject = {"user": account.user, "groups": [*groups, "system:authenticated"]}
    try:
        found = {each: rbac.may(cluster.api, each, where, subject) for each in wanted}
    except RefusedError as error:
        message = f"may not check what {account.user} may do ({error}); check each one"
        show = f"kubectl auth can-i {wanted[0]} --namespace {where} --as {account.user}"
        return Finding("warn", message, show)
    return _judged(where, account.user, role, found)


def _judged(where: str, user: str, role: str, found: Mapping[Permission, bool]) -> Finding:
    missing = [permission for permission, allowed in found.items() if not allowed]
    if not missing:
        return Finding("ok", f"{user} may do in {where} all that {role} of {FILE} grants")
    fatal = any(not permission.is_optional for permission in missing)
    message = f"{user} may not in {where}: {', '.join(map(str, missing))}"
    return Finding("fail" if fatal else "warn", message, granting(where, user, role))


# The account of a KFP instance for one team; that of a profile is `default-editor`.
USUAL = "pipeline-runner"


def account_of(text: str, namespace: str) -> Account:
    """Return the account that `[NAMESPACE:]NAME` names, the usual one where it is empty."""
    place, _, name = text.rpartition(":")
    return Account(place or namespace, name or USUAL)


def check_name(text: str) -> None:
    """Raise a `ConfigError` for what is no `[NAMESPACE:]NAME`."""
    parts = text.split(":")
    if text and (len(parts) > 2 or not all(part and part == quote(part, "") for part in parts)):  # noqa: PLR2004
        raise ConfigError(f"--service-account {text!r}: write it as NAME or NAMESPACE:NAME")


def of_the_ui(cluster: Cluster, account: Account) -> Finding:
    """Check that the account of runs that are started from the KFP UI is there, and name it."""
    message = f"runs started from the KFP UI use {account.user}"
    place = f"/api/v1/namespaces/{account.namespace}/serviceaccounts/{account.name}"
    try:
        cluster.api.read(place)
    except RefusedError as error:
        if not error.is_missing:
            raise
        message += ", which does not exist: name the right one by --service-account NAMESPACE:NAME"
        show = f"kubectl get serviceaccounts --namespace {account.namespace}"
        return Finding("fail", message, show)
    return Finding("ok", message)
