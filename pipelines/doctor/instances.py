"""Whether the KFP instance answers, and what it is."""

from __future__ import annotations

from pipelines.doctor.finding import Finding
from pipelines.instance import found_access, version


def reached(endpoint: str) -> Finding:
    """Check the instance that an option or the environment names; raises `UserError`."""
    access = found_access(endpoint)
    told = version(access)
    if not told:
        said = f"{access.endpoint} answers, and does not tell its version"
        return Finding("warn", said, f"curl {access.endpoint}/apis/v2beta1/healthz")
    return Finding("ok", f"{access.endpoint} is KFP {told}")
