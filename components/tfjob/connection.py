"""Where the Kubernetes API is, and as whom this process speaks to it."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import urllib3
from kubernetes import client, config
from kubernetes.client.rest import RESTClientObject

from trainer.errors import UserError

_MOUNTED = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# As many streams at once as a large job has tasks, and the calls beside them.
_CONNECTIONS = 256


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach the API.

    Attributes:
        namespace: that of this process.
        service_account: as whom a pod of the namespace speaks; empty where this is no pod.
    """

    configuration: client.Configuration
    namespace: str
    service_account: str

    def pool(self) -> urllib3.PoolManager:
        """Return a pool of connections of its own."""
        return RESTClientObject(self.configuration, maxsize=_CONNECTIONS).pool_manager

    def headers(self) -> Mapping[str, str]:
        """Return what every request carries; tokens are read again when they have been renewed."""
        token = self.configuration.auth_settings().get("BearerToken", {}).get("value")
        return {"authorization": token} if token else {}


def connect() -> Connection:
    """Return the connection of the pod that this is, or of the kubeconfig; raises `UserError`."""
    found = client.Configuration()
    # What to try again, and for how long, is decided by the caller.
    found.retries = False
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(client_configuration=found)
            namespace = (_MOUNTED / "namespace").read_text(encoding="utf-8").strip()
            token = (_MOUNTED / "token").read_text(encoding="utf-8")
            return Connection(
                configuration=found, namespace=namespace, service_account=_account(token)
            )
        path = os.environ.get("KUBECONFIG") or None
        config.load_kube_config(config_file=path, client_configuration=found)
        _, active = config.list_kube_config_contexts(config_file=path)
    # The loader stumbles in many ways over a file that is no kubeconfig.
    except Exception as error:
        raise UserError(
            f"no Kubernetes API to launch on: {' '.join(str(error).split())}; "
            "run in a cluster, or set KUBECONFIG, or choose cluster.launcher local"
        ) from None
    namespace = active["context"].get("namespace") or "default"
    return Connection(configuration=found, namespace=namespace, service_account="")


def _account(token: str) -> str:
    """Return the service account of a token (RFC 7519), or nothing if it does not say."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        *_, kind, _, name = claims["sub"].split(":")
    except (IndexError, KeyError, ValueError, binascii.Error):
        return ""
    return name if kind == "serviceaccount" else ""
