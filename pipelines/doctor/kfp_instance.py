"""Whether the KFP instance answers, and what it is."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

from pipelines.doctor.check import Finding
from pipelines.runs.kfp_access import ENDPOINT, NAMESPACE, is_named
from pipelines.runs.kfp_client import found_access, health

SECONDS = 20.0
_HEALTH = "/apis/v2beta1/healthz"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What a person says of the instance; the environment says the rest."""

    endpoint: str = ""
    namespace: str = ""
    token_file: str = ""
    cookies_file: str = ""
    ca_file: str = ""


def show(instance: Instance) -> str:
    """Return the command that shows what the instance answers."""
    given = shlex.quote(instance.endpoint.rstrip("/")) if instance.endpoint else f'"${ENDPOINT[0]}"'
    return "" if "@" in given else f"curl --include {given}{_HEALTH}"


def reached(instance: Instance) -> Finding:
    """Check the instance that options or the environment name; raises `UserError`."""
    if not is_named(instance.endpoint):
        said = f"no instance is named: give --endpoint, or set {ENDPOINT[0]}"
        return Finding("skipped", said)
    access = found_access(**asdict(instance))
    told = health(access)
    if told.is_shared and not access.namespace:
        said = f"{access.endpoint} has several users: give --namespace, or set {NAMESPACE[0]}"
        return Finding("fail", said, "flotilla doctor --namespace NAMESPACE")
    if not told.version:
        said = f"{access.endpoint} answers, and does not tell its version"
        return Finding("warn", said, show(instance))
    where = f", in {access.namespace}" if told.is_shared else ""
    return Finding("ok", f"{access.endpoint} is KFP {told.version}{where}")
