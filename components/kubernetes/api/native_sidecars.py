"""Native sidecars of Kubernetes 1.29 and later: init containers that keep running (KEP-753).

An older API server drops the field that marks them, and then the user's program never starts.
"""

from __future__ import annotations

import re

from flotilla.components.kubernetes.api.client import Api, RefusedError
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

OLDEST = (1, 29)
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


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
