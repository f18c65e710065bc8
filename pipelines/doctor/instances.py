"""Whether the KFP instance answers, and what it is."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict, dataclass

from pipelines.access import ENDPOINT
from pipelines.doctor.finding import Finding
from pipelines.instance import found_access, version

SECONDS = 20.0
_HEALTH = "/apis/v2beta1/healthz"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What a person says of the instance; the environment says the rest. See `pipelines.access`."""

    endpoint: str = ""
    token_file: str = ""
    cookies_file: str = ""
    ca_file: str = ""


def show(instance: Instance) -> str:
    """Return the command that shows what the instance answers."""
    given = shlex.quote(instance.endpoint.rstrip("/")) if instance.endpoint else f'"${ENDPOINT[0]}"'
    return "" if "@" in given else f"curl --include {given}{_HEALTH}"


def reached(instance: Instance) -> Finding:
    """Check the instance that options or the environment name; raises `UserError`."""
    if not (instance.endpoint or any(os.environ.get(name) for name in ENDPOINT)):
        said = f"no instance is named: give --endpoint, or set {ENDPOINT[0]}"
        return Finding("skipped", said)
    access = found_access(**asdict(instance))
    told = version(access)
    if not told:
        said = f"{access.endpoint} answers, and does not tell its version"
        return Finding("warn", said, show(instance))
    return Finding("ok", f"{access.endpoint} is KFP {told}")
