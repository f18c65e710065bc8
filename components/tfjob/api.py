"""The calls that the launcher makes: TFJobs, pods, logs and events of one namespace.

Plain HTTP over the connection of the Kubernetes client: a stream has to be read line by line, with
a deadline of its own, and what a dropped line was must not be guessed by a library.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

import urllib3

from components.tfjob import names
from components.tfjob.connection import Connection
from components.tfjob.pods import CONTAINER

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
