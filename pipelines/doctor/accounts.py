"""The service account as which runs that are started from the KFP UI speak, and its namespace."""

from __future__ import annotations

import re
from urllib.parse import quote

from pipelines.access import NAMESPACE, found_namespace
from pipelines.doctor.finding import Finding
from pipelines.doctor.kubernetes_api import Kubernetes, told
from pipelines.doctor.permissions import Account
from trainer.errors import ConfigError

# The account of a KFP instance for one team, and of a profile of one for many.
USUAL, PROFILES = "pipeline-runner", "default-editor"
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


def account_of(text: str, namespace: str) -> Account:
    """Return the account that `[NAMESPACE:]NAME` names, the usual one where it is empty."""
    place, _, name = text.rpartition(":")
    return Account(place or namespace, name or USUAL)


def check_name(text: str) -> None:
    """Raise a `ConfigError` for what is no `[NAMESPACE:]NAME`."""
    parts = text.split(":")
    if text and (len(parts) > 2 or not all(part and part == quote(part, "") for part in parts)):  # noqa: PLR2004
        raise ConfigError(f"--service-account {text!r}: write it as NAME or NAMESPACE:NAME")


def check_namespace(given: str) -> None:
    """Raise a `ConfigError` for what, given or of the environment, is no name of a namespace."""
    name = found_namespace(given)
    if name and not _LABEL.fullmatch(name):
        where = "--namespace" if given else NAMESPACE[0]
        raise ConfigError(
            f"{where} {name!r} is not the name of a namespace: small letters, digits and '-', "
            "63 at most"
        )


def of_the_ui(kubernetes: Kubernetes, account: Account, text: str) -> Finding:
    """Check that the account of runs that are started from the KFP UI is there, and name it.

    `text` is what a person said of it.
    """
    answer = kubernetes.get(_path(account))
    said = f"runs started from the KFP UI speak as {account.user}"
    if answer.is_good:
        return Finding("ok", said)
    show = f"kubectl get serviceaccounts --namespace {account.namespace}"
    if not answer.is_missing:
        seen = told(answer, "it", show)
        return Finding(seen.state, f"{said}; {seen.message}", show)
    profiles = Account(account.namespace, PROFILES)
    if not text and kubernetes.get(_path(profiles)).is_good:
        again = f"flotilla doctor --service-account {PROFILES}"
        return Finding("fail", f"{said}, which is not there; {PROFILES} of a profile is", again)
    said = f"{said}, which is not there: name the one that is by --service-account NAMESPACE:NAME"
    return Finding("fail", said, show)


def _path(account: Account) -> str:
    return f"/api/v1/namespaces/{quote(account.namespace)}/serviceaccounts/{quote(account.name)}"
