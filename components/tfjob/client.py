"""The calls that the launcher makes: TFJobs, pods, logs and events of one namespace.

Plain HTTP over the connection of the Kubernetes client: a stream has to be read line by line, with
a deadline of its own, and what a dropped line was must not be guessed by a library.

Where the Kubernetes API is, and as whom this process speaks to it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import urllib3
from kubernetes import client, config
from kubernetes.client.rest import RESTClientObject

from components.tfjob import names
from components.tfjob.manifest import CONTAINER
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


Tree = dict[str, Any]
_SECONDS = urllib3.Timeout(connect=5, read=30)
# A stream that says nothing for so long is opened again: a dead peer is silent too.
STREAM_SECONDS = 60
# A token that has run out is renewed on its node after a while.
_BUSY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_QUICK = urllib3.Timeout(connect=2, read=5)


class RefusedError(Exception):
    """The API has answered, and not done what was asked."""

    def __init__(self, code: int, message: str) -> None:
        """Keep the HTTP status and the words of the API."""
        super().__init__(f"{message} (HTTP {code})")
        self.code = code

    @property
    def is_missing(self) -> bool:
        """Whether there is no such object."""
        return self.code == HTTPStatus.NOT_FOUND

    @property
    def is_conflict(self) -> bool:
        """Whether there is one already, or another one than was meant."""
        return self.code == HTTPStatus.CONFLICT

    @property
    def is_forbidden(self) -> bool:
        """Whether a permission is missing."""
        return self.code == HTTPStatus.FORBIDDEN

    @property
    def is_forgotten(self) -> bool:
        """Whether the version that was asked for is too old."""
        return self.code == HTTPStatus.GONE


class UnreachableError(Exception):
    """The API has not answered, or is too busy to; the same call may do better later.

    Attributes:
        wait: seconds that the API asks to be left alone.
    """

    def __init__(self, message: str, wait: float = 0.0) -> None:
        """Keep the words and the seconds."""
        super().__init__(message)
        self.wait = wait


class Api:
    """The API in one namespace. Its methods raise `RefusedError` and `UnreachableError`."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        """Open no connection yet."""
        self._connection = connection
        self._pool = connection.pool()
        self._namespace = quote(namespace)
        self.answered_at = time.monotonic()

    def create_job(self, tree: Tree) -> Tree:
        """Create a TFJob; 409 where there is one of its name."""
        return self._ask("POST", self._jobs(), body=tree)

    def get_job(self, name: str) -> Tree:
        """Return a TFJob."""
        return self._ask("GET", self._jobs(name))

    def jobs(self, label: str) -> list[Tree]:
        """Return the TFJobs with a label."""
        found: list[Tree] = self._ask("GET", self._jobs(), {"labelSelector": label})["items"]
        return found

    def patch_job(self, name: str, patch: Tree) -> Tree:
        """Merge a patch into a TFJob."""
        return self._ask("PATCH", self._jobs(name), body=patch)

    def delete_job(self, name: str, uid: str = "", *, quick: bool = False) -> bool:
        """Delete a TFJob (only the one with this uid); False where there is none (any more)."""
        body: Tree = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
        }
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            timeout = _QUICK if quick else _SECONDS
            self._ask("DELETE", self._jobs(name), body=body, timeout=timeout)
        except RefusedError as error:
            if error.is_missing or (uid and error.is_conflict):
                return False
            raise
        return True

    def pods(self, label: str) -> list[Tree]:
        """Return the pods with a label."""
        found: list[Tree] = self._ask("GET", self._core("pods"), {"labelSelector": label})["items"]
        return found

    def get_pod(self, name: str) -> Tree:
        """Return a pod."""
        return self._ask("GET", self._core("pods", name))

    def events(self, about: str) -> list[Tree]:
        """Return the events about an object."""
        query = {"fieldSelector": f"involvedObject.name={about}"}
        found: list[Tree] = self._ask("GET", self._core("events"), query)["items"]
        return found

    def list_of(self, kind: str, query: Mapping[str, str]) -> tuple[list[Tree], str]:
        """Return all objects of a kind that a query selects, and the version of the list."""
        found = self._ask("GET", self._of_kind(kind), query)
        return found["items"], found["metadata"]["resourceVersion"]

    def watch(self, kind: str, query: Mapping[str, str], version: str) -> Iterator[Tree]:
        """Yield what happens to the objects of a kind after a version, until the stream ends."""
        asked = {
            **query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(STREAM_SECONDS - 10),
        }
        for line in self._lines(self._of_kind(kind), asked):
            if line.endswith("\n"):
                yield json.loads(line)

    def log(self, pod: str, *, since: str, follow: bool, previous: bool) -> Iterator[str]:
        """Yield the lines of a pod's log with their times; the last one may lack its end."""
        query = {
            "container": CONTAINER,
            "timestamps": "true",
            "follow": str(follow).lower(),
            "previous": str(previous).lower(),
            **({"sinceTime": since} if since else {}),
        }
        return self._lines(f"{self._core('pods', pod)}/log", query)

    def _jobs(self, name: str = "") -> str:
        group = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{self._namespace}/{names.PLURAL}"
        return f"{group}/{quote(name)}" if name else group

    def _core(self, kind: str, name: str = "") -> str:
        path = f"/api/v1/namespaces/{self._namespace}/{kind}"
        return f"{path}/{quote(name)}" if name else path

    def _of_kind(self, kind: str) -> str:
        return self._jobs() if kind == names.PLURAL else self._core(kind)

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Tree | None = None,
        timeout: urllib3.Timeout = _SECONDS,
    ) -> Tree:
        answer = self._open(method, path, query or {}, body, timeout, stream=False)
        tree: Tree = json.loads(answer.data)
        return tree

    def _lines(self, path: str, query: Mapping[str, str]) -> Iterator[str]:
        timeout = urllib3.Timeout(connect=5, read=STREAM_SECONDS)
        with closing(self._open("GET", path, query, None, timeout, stream=True)) as answer:
            rest = b""
            try:
                for chunk in answer.stream(2**16, decode_content=True):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        yield f"{line.decode(errors='replace')}\n"
            except urllib3.exceptions.HTTPError as error:
                raise UnreachableError(str(error)) from None
            if rest:
                yield rest.decode(errors="replace")

    def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Tree | None,
        timeout: urllib3.Timeout,
        *,
        stream: bool,
    ) -> urllib3.BaseHTTPResponse:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        url = f"{self._connection.configuration.host}{path}"
        try:
            answer = self._pool.request(
                method,
                f"{url}?{urlencode(query)}" if query else url,
                body=None if body is None else json.dumps(body),
                headers={**self._connection.headers(), "Content-Type": kind},
                timeout=timeout,
                preload_content=not stream,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"{method} {path}: {error}") from None
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            with closing(answer):
                said = _error_of(answer, f"{method} {path}")
            if isinstance(said, RefusedError):
                self.answered_at = time.monotonic()
            raise said
        self.answered_at = time.monotonic()
        return answer


def _error_of(answer: urllib3.BaseHTTPResponse, request: str) -> Exception:
    try:
        message = json.loads(answer.data).get("message") or answer.reason or ""
    except (ValueError, AttributeError, urllib3.exceptions.HTTPError):
        message = answer.reason or ""
    words = f"{request}: {' '.join(str(message).split())}"
    if answer.status in _BUSY or answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        wait = answer.headers.get("Retry-After", "")
        return UnreachableError(words, float(wait) if wait.isdigit() else 0.0)
    return RefusedError(answer.status, words)
