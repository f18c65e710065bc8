"""Whether the permissions of the launcher, and of the guard of the leading task, are granted.

The Kubernetes API itself reviews one permission at a time: for the caller, for the service accounts
of steps and tasks, and for that of runs that are started from the KFP UI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from components.kubernetes.api.kinds import JobKind
from components.kubernetes.api.rbac import (
    FILE,
    LAUNCHER,
    REVIEWS,
    WHO,
    Permission,
    granting,
    needed,
)
from components.kubernetes.names import Tree
from pipelines.doctor.examination import Finding
from pipelines.doctor.kubernetes_api import Answer, Kubernetes, unexpected
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


def of_this_user(kubernetes: Kubernetes, kind: JobKind) -> Finding:
    """Check that the caller may launch a job."""
    user = _name_of_this_user(kubernetes)
    answers = _reviews(kubernetes, "SelfSubjectAccessReview", {}, needed(LAUNCHER, kind))
    if isinstance(answers, Answer):
        message = f"the API does not return what {user or 'this user'} may do ({answers.words})"
        return Finding(
            "fail", message, f"kubectl auth can-i --list --namespace {kubernetes.namespace}"
        )
    return _judged(kubernetes, user, LAUNCHER, answers)


def of_account(kubernetes: Kubernetes, account: Account, role: str, kind: JobKind) -> Finding:
    """Check that a service account has what a role of deploy/base/rbac.yaml grants."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.namespace}"]
    subject = {"user": account.user, "groups": [*groups, "system:authenticated"]}
    answers = _reviews(kubernetes, "SubjectAccessReview", subject, needed(role, kind))
    if isinstance(answers, Answer):
        message = f"may not check what {account.user} may do ({answers.words})"
        where = f"--namespace {kubernetes.namespace} --as {account.user}"
        show = f"kubectl auth can-i {needed(role, kind)[0]} {where}"
        return Finding("warn", f"{message}; check each one", show)
    return _judged(kubernetes, account.user, role, answers)


def _reviews(
    kubernetes: Kubernetes, kind: str, subject: Tree, needed: Sequence[Permission]
) -> dict[Permission, bool] | Answer:
    """Return which permissions are there, or the answer of an API that does not say."""
    found: dict[Permission, bool] = {}
    for permission in needed:
        attributes = permission.attributes(kubernetes.namespace)
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": kind,
            "spec": {"resourceAttributes": attributes, **subject},
        }
        answer = kubernetes.post(f"{REVIEWS}/{kind.lower()}s", body)
        if not answer.is_good:
            return answer
        found[permission] = bool(answer.tree.get("status", {}).get("allowed"))
    return found


def _judged(
    kubernetes: Kubernetes, user: str, role: str, answers: dict[Permission, bool]
) -> Finding:
    who, where = user or "this user", kubernetes.namespace
    missing = [permission for permission, allowed in answers.items() if not allowed]
    if not missing:
        return Finding("ok", f"{who} may do in {where} all that {role} of {FILE} grants")
    words = ", ".join(map(str, missing))
    fatal = any(not permission.is_optional for permission in missing)
    message = f"{who} may not in {where}: {words}"
    return Finding("fail" if fatal else "warn", message, granting(where, user, role))


def _name_of_this_user(kubernetes: Kubernetes) -> str:
    """Return as whom we ask, and nothing where the API does not say (Kubernetes before 1.28)."""
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    answer = kubernetes.post(WHO, body)
    if answer.status not in (HTTPStatus.OK, HTTPStatus.CREATED):
        return ""
    return str(answer.tree.get("status", {}).get("userInfo", {}).get("username") or "")


# The account of a KFP instance for one team, and of a profile of one for many.
USUAL, PROFILES = "pipeline-runner", "default-editor"


def account_of(text: str, namespace: str) -> Account:
    """Return the account that `[NAMESPACE:]NAME` names, the usual one where it is empty."""
    place, _, name = text.rpartition(":")
    return Account(place or namespace, name or USUAL)


def check_name(text: str) -> None:
    """Raise a `ConfigError` for what is no `[NAMESPACE:]NAME`."""
    parts = text.split(":")
    if text and (len(parts) > 2 or not all(part and part == quote(part, "") for part in parts)):  # noqa: PLR2004
        raise ConfigError(f"--service-account {text!r}: write it as NAME or NAMESPACE:NAME")


def of_the_ui(kubernetes: Kubernetes, account: Account, text: str) -> Finding:
    """Check that the account of runs that are started from the KFP UI is there, and name it.

    `text` is the option that named it.
    """
    answer = kubernetes.get(_account_path(account))
    message = f"runs started from the KFP UI use {account.user}"
    if answer.is_good:
        return Finding("ok", message)
    show = f"kubectl get serviceaccounts --namespace {account.namespace}"
    if not answer.is_missing:
        seen = unexpected(answer, "it", show)
        return Finding(seen.state, f"{message}; {seen.message}", show)
    profiles = Account(account.namespace, PROFILES)
    if not text and kubernetes.get(_account_path(profiles)).is_good:
        again = f"flotilla doctor --service-account {PROFILES}"
        return Finding(
            "fail", f"{message}, which does not exist; {PROFILES} of a profile does", again
        )
    message = (
        f"{message}, which does not exist: name the right one by --service-account NAMESPACE:NAME"
    )
    return Finding("fail", message, show)


def _account_path(account: Account) -> str:
    return f"/api/v1/namespaces/{quote(account.namespace)}/serviceaccounts/{quote(account.name)}"
