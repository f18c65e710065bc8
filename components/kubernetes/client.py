"""A client of the Kubernetes API for one namespace: objects, pod logs, watches and retries.

Addresses and credentials come from the `kubernetes` package; the requests are plain HTTP. Unlike
that package's watch, this client has a timeout for each line of a stream, and returns a truncated
last line, which has no newline.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import tenacity
import urllib3
from kubernetes import client, config
from kubernetes.client.rest import RESTClientObject

from flotilla.components.kubernetes.names import CONTAINER, PODS, JobKind, Resource, Tree
from flotilla.trainer.runtime.errors import TransientError, UserError
from flotilla.trainer.runtime.json_records import parse_number

log = logging.getLogger(__name__)
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Number of connections that the pool keeps open. A large job needs one for each task's log.
_CONNECTIONS = 256
_TIMEOUT = urllib3.Timeout(connect=5, read=30)
_QUICK_TIMEOUT = urllib3.Timeout(connect=2, read=5)
# A stream that is silent for this many seconds is reopened, because its peer may be dead.
STREAM_SECONDS = 60
# HTTP statuses of transient errors. The kubelet soon renews an expired token (401), 500 may mean
# that a webhook did not respond, and 502 to 504 come from proxies and overload. In contrast, a
# method or protocol that the server does not support (501, 505) is a permanent error.
_RETRYABLE = (
    HTTPStatus.UNAUTHORIZED, HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)  # fmt: skip
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0
# The message of the API server's error 500 if the webhook of a job controller (the training
# operator or JobSet) does not respond.
_SILENT_CONTROLLER = re.compile(r"failed calling webhook .*(training-operator|jobset)")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The address and credentials of the API. Outside a pod, `service_account` is empty."""

    configuration: client.Configuration
    namespace: str
    service_account: str


def connect() -> Connection:
    """Return the connection settings of this pod or of the kubeconfig. Raises `UserError`."""
    configuration = client.Configuration()
    # Retry no request here, because the caller decides what to retry, and for how long.
    configuration.retries = False
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
            config.load_incluster_config(client_configuration=configuration)
            namespace = (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            token = (_SERVICE_ACCOUNT / "token").read_text(encoding="utf-8")
            return Connection(
                configuration=configuration,
                namespace=namespace,
                service_account=_service_account(token),
            )
        path = os.environ.get("KUBECONFIG") or None
        config.load_kube_config(config_file=path, client_configuration=configuration)
        _, active = config.list_kube_config_contexts(config_file=path)
    # Catch every exception, because an invalid kubeconfig causes many kinds of errors.
    except Exception as error:
        raise UserError(
            f"cannot find a Kubernetes API to launch the job: {' '.join(str(error).split())}; "
            "run in a cluster, set KUBECONFIG, or set cluster.launcher=local"
        ) from None
    namespace = active["context"].get("namespace") or "default"
    return Connection(configuration=configuration, namespace=namespace, service_account="")


def _service_account(token: str) -> str:
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        *_, kind, _, name = claims["sub"].split(":")
    except (IndexError, KeyError, ValueError):
        return ""
    return name if kind == "serviceaccount" else ""


class RefusedError(Exception):
    """The API refused a request. `is_unserved` is true if it does not serve the kind of object."""

    def __init__(self, code: int, message: str, *, is_unserved: bool = False) -> None:
        """Store the HTTP status and the message of the API."""
        super().__init__(f"{message} (HTTP {code})")
        self.code = code
        self.is_unserved = is_unserved

    @property
    def is_missing(self) -> bool:
        """Whether the API refused the request because the object does not exist."""
        return self.code == HTTPStatus.NOT_FOUND

    @property
    def is_forbidden(self) -> bool:
        """Whether this user lacks the permission."""
        return self.code == HTTPStatus.FORBIDDEN

    @property
    def is_of_unknown_fields(self) -> bool:
        """Whether strict validation refused the object because of an unknown field."""
        return "unknown field" in str(self)


class UnreachableError(Exception):
    """A transient failure of a request. The API may ask for a pause of `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        """Store the cause and the seconds to wait."""
        super().__init__(message)
        self.retry_after = retry_after


class SilentControllerError(UnreachableError):
    """The admission webhook of the job controller does not respond to the API server."""


class Api:
    """The API in one namespace. Its methods raise `RefusedError` and `UnreachableError`."""

    def __init__(
        self, connection: Connection, namespace: str, timeout: urllib3.Timeout = _TIMEOUT
    ) -> None:
        """Store the arguments without connecting. `timeout` is the default for requests."""
        self._configuration = connection.configuration
        pool = RESTClientObject(connection.configuration, maxsize=_CONNECTIONS)
        self._pool = pool.pool_manager
        self._namespace = quote(namespace or connection.namespace)
        self._timeout = timeout
        self.answered_at = time.monotonic()

    def create(
        self, resource: Resource, tree: Tree, *, strict: bool = False, is_tried: bool = False
    ) -> Tree:
        """Create an object. `strict` refuses unknown fields. `is_tried` makes this a dry run."""
        query = {"fieldValidation": "Strict"} if strict else {}
        query |= {"dryRun": "All"} if is_tried else {}
        return self._ask("POST", self._path(resource), query, body=tree)

    def get(self, resource: Resource, name: str) -> Tree:
        """Return an object."""
        return self._ask("GET", self._path(resource, name))

    def find(self, resource: Resource, name: str) -> Tree | None:
        """Return an object, or None if it does not exist."""
        try:
            return self.get(resource, name)
        except RefusedError as error:
            if error.is_missing:
                return None
            raise

    def patch(self, resource: Resource, name: str, patch: Tree, *, quick: bool = False) -> Tree:
        """Apply a merge patch to an object. `quick` shortens the timeout."""
        timeout = _QUICK_TIMEOUT if quick else None
        return self._ask("PATCH", self._path(resource, name), body=patch, timeout=timeout)

    def delete(self, resource: Resource, name: str, uid: str = "", *, quick: bool = False) -> None:
        """Delete an object and its dependents. Ignore a missing object, or one with another uid."""
        body: Tree = {"kind": "DeleteOptions", "apiVersion": "v1"}
        body["propagationPolicy"] = "Background"
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            timeout = _QUICK_TIMEOUT if quick else None
            self._ask("DELETE", self._path(resource, name), body=body, timeout=timeout)
        except RefusedError as error:
            if not error.is_missing and not (uid and error.code == HTTPStatus.CONFLICT):
                raise

    def read(self, path: str) -> Tree:
        """Return the JSON response for a path."""
        return self._ask("GET", path)

    def post(self, path: str, body: Tree) -> Tree:
        """Post a review, which the API evaluates but does not store, and return the response."""
        return self._ask("POST", path, body=body)

    def list_objects(self, resource: Resource, query: Mapping[str, str]) -> tuple[list[Tree], str]:
        """Return the objects of a kind that match a query, and the resource version of the list."""
        found = self._ask("GET", self._path(resource), query)
        return found["items"], found["metadata"]["resourceVersion"]

    def list_labelled(self, resource: Resource, label: str) -> list[Tree]:
        """Return the objects of a kind that match a label selector."""
        return self.list_objects(resource, {"labelSelector": label})[0]

    def serves(self, resource: Resource) -> bool:
        """Return whether the API serves a kind of object. Assume so if it refuses the lookup."""
        try:
            found = self.read(f"/apis/{resource.api_version}")
        except RefusedError as error:
            return not error.is_missing
        return any(each.get("name") == resource.plural for each in found.get("resources") or [])

    def watch(self, resource: Resource, query: Mapping[str, str], version: str) -> Iterator[Tree]:
        """Yield the events of a watch that starts at a resource version, until the stream ends."""
        parameters = {
            **query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(STREAM_SECONDS - 10),
        }
        for line in self._lines(self._path(resource), parameters):
            if line.endswith("\n"):
                yield json.loads(line)

    def recent_log(self, pod: str, seconds: int, container: str = CONTAINER) -> Iterator[str]:
        """Yield the lines that a pod's container logged in the last `seconds` seconds."""
        query = {"container": container, "sinceSeconds": str(seconds)}
        return self._lines(f"{self._path(PODS, pod)}/log", query)

    def log(
        self, pod: str, container: str, *, since: str, follow: bool, previous: bool
    ) -> Iterator[str]:
        """Yield the lines of a pod's log with timestamps. A truncated line has no newline."""
        query = {
            "container": container,
            "timestamps": "true",
            "follow": str(follow).lower(),
            "previous": str(previous).lower(),
            **({"sinceTime": since} if since else {}),
        }
        return self._lines(f"{self._path(PODS, pod)}/log", query)

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Tree | None = None,
        timeout: urllib3.Timeout | None = None,
        *,
        stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        """Return the response to a request, whatever its status. Raises `UnreachableError`."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        # Read the token for each request, because it may have been renewed.
        token = self._configuration.auth_settings().get("BearerToken", {}).get("value")
        try:
            return self._pool.request(
                method,
                f"{self._configuration.host}{path}{f'?{urlencode(query)}' if query else ''}",
                json=body,
                headers={"Content-Type": kind, **({"authorization": token} if token else {})},
                timeout=timeout or self._timeout,
                preload_content=not stream,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"{method} {path}: {error}") from None

    def _path(self, resource: Resource, name: str = "") -> str:
        path = resource.path(self._namespace)
        return f"{path}/{quote(name)}" if name else path

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Tree | None = None,
        timeout: urllib3.Timeout | None = None,
    ) -> Tree:
        answer = self.request(method, path, query, body, timeout)
        tree: Tree = self._check(answer, f"{method} {path}").json()
        return tree

    def _lines(self, path: str, query: Mapping[str, str]) -> Iterator[str]:
        timeout = urllib3.Timeout(connect=5, read=STREAM_SECONDS)
        opened = self.request("GET", path, query, timeout=timeout, stream=True)
        with closing(self._check(opened, f"GET {path}")) as answer:
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

    def _check(self, answer: urllib3.BaseHTTPResponse, request: str) -> urllib3.BaseHTTPResponse:
        failure = None
        if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
            with closing(answer):
                failure = _make_error(answer, request)
        if not isinstance(failure, UnreachableError):
            self.answered_at = time.monotonic()
        if failure:
            raise failure
        return answer


def _make_error(answer: urllib3.BaseHTTPResponse, request: str) -> Exception:
    try:
        message, is_object = json.loads(answer.data).get("message"), True
    except (ValueError, AttributeError, urllib3.exceptions.HTTPError):
        message, is_object = "", False
    text = f"{request}: {' '.join(str(message or answer.reason or '').split())}"
    if _SILENT_CONTROLLER.search(text):
        return SilentControllerError(text)
    if answer.status in _RETRYABLE:
        return UnreachableError(
            text, float(parse_number(answer.headers.get("Retry-After", "")) or 0)
        )
    # For an unknown resource, the API server responds with plain text instead of a `Status` object.
    is_unserved = answer.status == HTTPStatus.NOT_FOUND and not is_object
    return RefusedError(answer.status, text, is_unserved=is_unserved)


class Watch(threading.Thread):
    """A daemon thread that reports every object that is added, modified or deleted.

    The thread calls `on_event(object, deleted)`. After a long outage, the last resource
    version may have expired (410). The thread then lists the objects again, and reports missing
    objects as deleted, with their last known state.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        query: Mapping[str, str],
        on_event: Callable[[Tree, bool], None],
        on_refused: Callable[[RefusedError], None],
        known: Iterable[Tree] = (),
    ) -> None:
        """Store the arguments. Objects in `known` that no longer exist are reported as deleted."""
        super().__init__(name=f"watch {resource.plural}", daemon=True)
        self._api, self._resource, self._query = api, resource, query
        self._on_event, self._on_refused = on_event, on_refused
        self._known = {item["metadata"]["uid"]: item for item in known}
        self._version = ""
        self._wait = FIRST_WAIT
        self.stopped = threading.Event()

    def run(self) -> None:
        """List and watch until `stopped` is set, or until the API refuses a request."""
        while not self.stopped.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
                self._wait = FIRST_WAIT
            except RefusedError as error:
                if error.code != HTTPStatus.GONE:
                    self._on_refused(error)
                    return
                self._version = ""
            except UnreachableError as error:
                log.warning(
                    "the watch of %s was interrupted; retrying: %s", self._resource.plural, error
                )
                self.stopped.wait(max(self._wait, error.retry_after))
                self._wait = min(2 * self._wait, LONGEST_WAIT)

    def _list(self) -> None:
        items, self._version = self._api.list_objects(self._resource, self._query)
        listed = {item["metadata"]["uid"]: item for item in items}
        for uid in self._known.keys() - listed.keys():
            self._report(self._known[uid], deleted=True)
        for item in listed.values():
            self._report(item, deleted=False)

    def _watch(self) -> None:
        for event in self._api.watch(self._resource, self._query, self._version):
            item = event["object"]
            if event["type"] == "ERROR":
                raise RefusedError(int(item.get("code", HTTPStatus.GONE)), str(item.get("message")))
            self._version = item["metadata"]["resourceVersion"]
            self._wait = FIRST_WAIT
            if event["type"] != "BOOKMARK":
                self._report(item, deleted=event["type"] == "DELETED")
            if self.stopped.is_set():
                break

    def _report(self, item: Tree, *, deleted: bool) -> None:
        if self.stopped.is_set():
            return
        if deleted:
            self._known.pop(item["metadata"]["uid"], None)
        else:
            self._known[item["metadata"]["uid"]] = item
        self._on_event(item, deleted)


def call_with_retry(
    call: Callable[[], _Result],
    seconds: float,
    sleep: Callable[[float], None],
    kind: JobKind | None = None,
    silent_seconds: float = 0.0,
) -> _Result:
    """Make an API call, retry it while the API does not respond, and return the result.

    Args:
        call: the request; it is retried only after an `UnreachableError`.
        seconds: how long to retry; 0 means forever.
        sleep: waits between two attempts, and may raise an exception to stop retrying.
        kind: kind of the job in the request, for the error message.
        silent_seconds: how long to retry while the controller's webhook is silent; 0: `seconds`.

    Raises:
        TransientError: the API or the controller did not respond in time.
    """
    backoff = tenacity.wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT)

    def stop(state: tenacity.RetryCallState) -> bool:
        limit = (isinstance(_error(state), SilentControllerError) and silent_seconds) or seconds
        return bool(limit) and (state.seconds_since_start or 0.0) >= limit

    def pause(state: tenacity.RetryCallState) -> float:
        return max(backoff(state), getattr(_error(state), "retry_after", 0.0))

    def warn(state: tenacity.RetryCallState) -> None:
        is_silent = isinstance(_error(state), SilentControllerError)
        what = "the controller does not respond" if is_silent else "the API is unreachable"
        log.warning("%s; retrying: %s", what, _error(state))

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(UnreachableError),
        wait=pause,
        stop=stop,
        sleep=sleep,
        before_sleep=warn,
        reraise=True,
    )
    try:
        return retrying(call)
    except SilentControllerError as error:
        raise TransientError(
            silent_controller(kind, silent_seconds or seconds, str(error))
        ) from None
    except UnreachableError as error:
        raise TransientError(unreachable(seconds, str(error))) from None


def _error(state: tenacity.RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome else None


def describe_refusal(error: RefusedError, kind: JobKind) -> str:
    """Return the message for a request that the API refused, with a suggested fix."""
    remedy = ""
    if error.is_unserved:
        remedy = kind.remedy
    elif error.is_of_unknown_fields:
        remedy = kind.outdated
    elif error.is_missing:
        remedy = "correct the namespace; `flotilla doctor` shows which one does not exist"
    elif error.is_forbidden and " cannot " in str(error):
        remedy = "grant the step's service account the permissions in deploy/"
    return "; ".join(filter(None, [f"the Kubernetes API refused a request: {error}", remedy]))


def describe_foreign_deletion(job: str) -> str:
    """Return the message for a job that was deleted by someone other than this launcher."""
    return (
        f"another user or program deleted the job {job}, which ended the run; to continue from its "
        "newest checkpoint, use Retry in the KFP UI or `flotilla run --resume`"
    )


def silent_controller(kind: JobKind | None, seconds: float, detail: str) -> str:
    """Return the message for a controller that has ignored a job for `seconds`."""
    look = f"; check whether it is running: {kind.show}" if kind else ""
    return (
        f"the {kind.controller if kind else 'controller'} has not reacted for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.operator): {detail}{look}"
    )


def unreachable(seconds: float, detail: str) -> str:
    """Return the message for an API that has been unreachable for `seconds`."""
    return (
        f"the Kubernetes API has not answered for {seconds:g} s "
        f"(cluster.kubernetes.deadlines.unreachable): {detail}"
    )
