"""A client of a KFP instance with request timeouts and one-line error messages that suggest a fix.

The SDK's own client writes to the home folder, searches for clusters, opens a browser and prints
links. It waits without a time limit, and mistakes a login page for an empty list.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import re
import ssl
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import kfp_server_api
import urllib3
from kfp_server_api.exceptions import ApiException
from kfp_server_api.rest import RESTClientObject
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from flotilla.components.kfp_internals import make_client_type
from flotilla.pipelines.runs.kfp_access import Access
from flotilla.trainer.runtime import masking
from flotilla.trainer.runtime.errors import UserError

# Maximum length of an instance's message in characters. A message may contain a stack trace.
_MOST_WORDS = 300
_RENEW = "renew the token or cookies (--token-file, --cookies-file, KFP_EXISTING_TOKEN)"
_REMEDIES = {
    400: "fix the reported problem; a multi-user instance needs --namespace",
    401: f"it does not accept the credentials: {_RENEW}",
    403: "it accepts the credentials but denies the request: add --namespace, or ask its owner",
    404: "check the name or id and --endpoint, which must be the root of the instance",
    405: "check --endpoint, which is not the URL of a KFP API",
    409: "the object already exists, or another client has just changed it: check the object, "
    "and try again",
    413: "the request is too large for the instance or the proxy in front of it",
    429: "the instance receives too many requests: try again later",
}
_REDIRECTED = 3
_SERVER = 500
#: HTTP status codes for an invalid request, an object that does not exist, and one that already
#: exists.
REFUSED, ABSENT, CONFLICT = 400, 404, 409


class InstanceError(UserError):
    """A KFP instance refused a request with an HTTP `status`, or sent no valid response (0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        """Store the message and the HTTP status."""
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the failure is transient: the same request may succeed later."""
        return self.status in (0, 429) or self.status >= _SERVER

    @property
    def is_of_absent_workflow(self) -> bool:
        """Whether the object is in the instance's database, but no longer in the cluster."""
        return self.status >= _SERVER and "not found" in str(self)


def make_refusal(access: Access, where: str, error: Any) -> InstanceError:
    """Return the error for an `ApiException` (a status outside 200 to 299)."""
    status = int(error.status or 0)
    words = _words(access, error)
    said = f"{access.endpoint} answered {status} {error.reason or ''}".rstrip()
    if words:
        said += f" ({words})"
    if status // 100 == _REDIRECTED:
        remedy = _describe_redirect(access, error)
    elif status >= _SERVER and "not found" in words.lower():
        # Suggest the fix for status 404, because the server reports some missing objects as 500.
        remedy = _REMEDIES[404]
    elif status >= _SERVER:
        remedy = "the instance or a proxy in front of it has a problem: try again, or ask its owner"
    else:
        remedy = _REMEDIES.get(status, "check --endpoint")
    return InstanceError(f"{said} to {where}: {remedy}", status)


def make_network_error(access: Access, where: str, error: Exception) -> InstanceError:
    """Return the error for a connection that failed or timed out."""
    cause: BaseException = error
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason:
        cause = error.reason
    host = urlsplit(access.endpoint).netloc
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        return InstanceError(_tls(access, host, cause))
    if isinstance(cause, NameResolutionError):
        return InstanceError(f"the host of {access.endpoint} is unknown: check --endpoint")
    if isinstance(cause, NewConnectionError):
        return InstanceError(
            f"{host} refuses the connection: check --endpoint, or forward a port with "
            "`kubectl port-forward -n kubeflow svc/ml-pipeline 8888:8888`"
        )
    if isinstance(cause, ConnectTimeoutError):
        return InstanceError(
            f"{host} cannot be reached (timeout): check --endpoint, the VPN and the proxy"
        )
    if isinstance(cause, urllib3.exceptions.TimeoutError):
        return InstanceError(f"{host} does not respond to {where}: try again, or ask its owner")
    return InstanceError(
        f"{host} closed the connection during {where}: try again, or check whether --endpoint "
        "needs http:// or https://"
    )


def make_format_error(access: Access, where: str, answer: Any) -> InstanceError:
    """Return the error for a response that is not JSON, usually a login page."""
    kind = (answer.getheader("content-type") or "nothing").partition(";")[0]
    return InstanceError(
        f"{access.endpoint} answered {where} with {kind} instead of JSON, perhaps a login page: "
        f"check --endpoint, or {_RENEW}"
    )


def _tls(access: Access, host: str, cause: BaseException) -> str:
    words = " ".join(str(cause).split())
    if "NO_CERTIFICATE" in words or "PEM" in words:
        return f"{access.ca_file} contains no PEM certificate: pass another file with --ca-file"
    if "certificate" in words.lower():
        reason = words.rpartition("failed: ")[2].partition(" (_ssl")[0]
        return f"the certificate of {host} is not trusted ({reason}): pass its CA with --ca-file"
    return f"{host} does not use TLS: check the port, or use http:// in --endpoint"


def _describe_redirect(access: Access, error: Any) -> str:
    target = urlsplit((error.headers or {}).get("location", ""))
    place = f"{target.scheme}://{target.netloc}" if target.netloc else target.path
    if target.netloc and target.netloc != urlsplit(access.endpoint).netloc:
        return f"it redirects to {place} to log in: {_RENEW}"
    if target.scheme == "https" and access.endpoint.startswith("http:"):
        return f"it redirects to {place}: use https:// in --endpoint"
    return f"it redirects to {place}, perhaps a login page: {_RENEW}"


def _words(access: Access, error: Any) -> str:
    """Return the instance's message, shortened and without secrets, or "" for a web page."""
    body = error.body
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        tree = json.loads(text)
    except ValueError:
        # Use a plain text, for example from a proxy, as the message. Ignore a web page.
        tree = {} if text.lstrip().startswith("<") else {"message": text}
    if not isinstance(tree, dict):
        return ""
    said = tree.get("message") or tree.get("error_message") or tree.get("error") or ""
    return one_line(access.mask(str(said)))


def one_line(words: object) -> str:
    """Return a message as one printable line of limited length."""
    line = " ".join(masking.one_line(str(words or "")).split())
    return line if len(line) <= _MOST_WORDS else f"{line[:_MOST_WORDS]}..."


CONNECT_SECONDS = 3.0
# Maximum time without data from the instance, in seconds; the whole response may take longer.
READ_SECONDS = 8.0
# Time limits in seconds for whole requests, with retries and DNS lookup. A log may be long.
WHOLE_SECONDS = 22.0
LOG_SECONDS = 300.0
PAGE_SECONDS = 5.0
# Text on the page that the user interface returns for any path.
_UI = b"Kubeflow Pipelines"
BUSY = (429, 502, 503, 504)
#: The order of a list, newest first.
NEWEST = "created_at desc"
_HEALTH = ("/apis/v2beta1/healthz", "/apis/v1beta1/healthz")
_PAGE = 100
_VERSION_KEYS = ("tag_name", "apiServerTagName")
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


_OwnClient: Any = make_client_type()


class Client(_OwnClient):  # type: ignore[misc]
    """The SDK's client with timeouts, without output, and without files in the home folder."""

    def __init__(self, access: Access) -> None:
        """Configure the client without sending a request."""
        self.access = access
        with warnings.catch_warnings():
            # Suppress the SDK's warning about the server versions that it supports.
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(host=access.endpoint)
        self.set_user_namespace(access.namespace)
        api = self.requests
        api.cookie = access.cookies or None
        api.rest_client = _Requests(access, api.configuration)

    def make_configuration(self) -> kfp_server_api.Configuration:
        """Return the configuration of the requests."""
        config = kfp_server_api.Configuration()
        config.host = self.access.endpoint
        config.ssl_ca_cert = self.access.ca_file or None
        # A request that timed out is not repeated, and a write is sent only once.
        config.retries = urllib3.Retry(
            total=2,
            read=0,
            other=0,
            # Do not follow a redirect, which leads to a login page and turns a POST into a GET.
            redirect=False,
            status_forcelist=BUSY,
            allowed_methods=("GET",),
            backoff_factor=0.5,
            respect_retry_after_header=False,
            raise_on_status=False,
        )
        if self.access.has_token():
            config.api_key["authorization"] = ""
            config.api_key_prefix["authorization"] = "Bearer"
            config.refresh_api_key_hook = self._fresh_token
        return config

    def _fresh_token(self, config: kfp_server_api.Configuration) -> None:
        # Read the token for each request, because the kubelet renews the file.
        config.api_key["authorization"] = self.access.read_token()

    def page(self, path: str) -> str:
        """Return the URL of a page of the user interface, or an empty string if it is unknown."""
        return f"{self._ui}/#/{path}" if self._ui else ""

    @functools.cached_property
    def _ui(self) -> str:
        """The configured address of the user interface, or the endpoint if it serves one."""
        if self.access.ui:
            return self.access.ui
        with suppress(InstanceError):
            answer = self._send("page", "/")
            if _UI in answer.data:
                return self.access.endpoint
        return ""

    def get_json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`. Raises `InstanceError`."""
        tree: dict[str, Any] = json.loads(self._send("request", path).data)
        return tree

    def get_text(self, path: str) -> str:
        """Return the plain text at `path`, which may be empty. Raises `InstanceError`."""
        return str(self._send("text", path).data.decode("utf-8", "replace"))

    def _send(self, method: str, path: str) -> Any:
        api = self.requests
        headers: dict[str, str] = {**api.default_headers, "Accept": "text/plain, application/json"}
        if api.cookie:
            headers["Cookie"] = api.cookie
        api.update_params_for_auth(headers, [], ["Bearer"])
        url = self.access.endpoint + path
        return getattr(api.rest_client, method)("GET", url, headers=headers)


class _Requests(RESTClientObject):  # type: ignore[misc]
    """Sends the requests of the generated client with timeouts. Raises `InstanceError`."""

    def __init__(self, access: Access, config: kfp_server_api.Configuration) -> None:
        self._access = access
        super().__init__(config)

    def request(self, method: str, url: str, **named: Any) -> Any:
        """Send a request, and return its response, which must be a JSON object."""
        answer, where = self._send_request(method, url, WHOLE_SECONDS, **named)
        try:
            tree = json.loads(answer.data)
        except ValueError:
            raise make_format_error(self._access, where, answer) from None
        if not isinstance(tree, dict):
            raise InstanceError(
                f"{self._access.endpoint} does not respond to {where} like a KFP instance: check "
                "--endpoint"
            )
        return answer

    def text(self, method: str, url: str, **named: Any) -> Any:
        """Send a request, and return its response, which may be long but must not be a web page."""
        answer, where = self._send_request(method, url, LOG_SECONDS, **named)
        if "html" in (answer.getheader("content-type") or ""):
            raise make_format_error(self._access, where, answer)
        return answer

    def page(self, method: str, url: str, **named: Any) -> Any:
        """Send a request with a short timeout, because its response is only needed for a link."""
        return self._send_request(method, url, PAGE_SECONDS, **named)[0]

    def _send_request(self, method: str, url: str, seconds: float, **named: Any) -> tuple[Any, str]:
        """Send a request, and return the response and a description of the request."""
        named["_request_timeout"] = (CONNECT_SECONDS, READ_SECONDS)
        where = f"{method} {urlsplit(url).path}"
        send = functools.partial(super().request, method, url, **named)
        try:
            return _call_with_limit(send, seconds), where
        except TimeoutError:
            host = urlsplit(url).netloc
            words = f"{host} takes too long to answer {where}: try again, or ask its owner"
            raise InstanceError(words) from None
        except ApiException as error:
            raise make_refusal(self._access, where, error) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise make_network_error(self._access, where, error) from None


def _call_with_limit(call: Callable[[], Any], seconds: float) -> Any:
    """Return the result of `call`. Raises `TimeoutError` after `seconds`, even in a DNS lookup."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    # Do not use an executor, which would wait for its thread when the process exits.
    threading.Thread(target=work, daemon=True).start()
    return answer.result(seconds)


def connect(access: Access) -> Client:
    """Return a client of the instance without sending a request."""
    # Hide the log of retries, which contains URLs and which the SDK's settings would print.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    return Client(access)


def ask(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a client method. Every failure raises an `InstanceError`."""
    try:
        # Discard the links to pages that the client prints.
        with redirect_stdout(io.StringIO()):
            return call(*arguments, **named)
    except (ApiException, TypeError, ValueError) as error:
        words = " ".join(str(error).split())
        raise InstanceError(f"the KFP client cannot read the response: {words}") from None


def create_or_find(create: Callable[[], Any], key: str, find: Callable[[], str]) -> str:
    """Create an object and return its id. If another client has created it first, find its id."""
    try:
        return str(getattr(create(), key))
    except InstanceError as error:
        if error.status == CONFLICT and (found := find()):
            return found
        raise


def pages(
    call: Callable[..., Any], items: str, *, size: int = _PAGE, most: int = 0, **named: Any
) -> Iterator[Any]:
    """Yield up to `most` items of a paged list call, or all items if `most` is 0."""
    token, seen, left = "", set[str](), most or sys.maxsize
    while token not in seen:
        seen.add(token)
        page = ask(call, page_token=token, page_size=min(size, left), **named)
        found = getattr(page, items) or []
        yield from found[:left]
        left -= len(found)
        token = page.next_page_token or ""
        if not token or left <= 0:
            return


def equals(key: str, value: str) -> str:
    """Return an API filter for a field with this value. The instance ignores case."""
    return _filter("EQUALS", key, value)


def containing(key: str, value: str) -> str:
    """Return a filter for fields that contain `value`, in which `%` and `_` are wildcards."""
    # A backslash would escape the next character, so use the longest part without one.
    return _filter("IS_SUBSTRING", key, max(value.split("\\"), key=len))


def _filter(operation: str, key: str, value: str) -> str:
    predicate = {"operation": operation, "key": key, "stringValue": value}
    # The server decodes this parameter twice, so a `+` would become a space.
    return quote(json.dumps({"predicates": [predicate]}), safe="")


def is_id(text: str) -> bool:
    """Return whether a text has the form of the id of a run or a version."""
    return _ID.fullmatch(text) is not None


@dataclass(frozen=True, kw_only=True)
class Health:
    """The version of an instance, if it reports one, and whether it is in multi-user mode."""

    version: str
    is_shared: bool


def health(access: Access) -> Health:
    """Return the version and mode, and check access to the namespace. Raises `UserError`."""
    client = connect(access)
    found = ask(client.get_json, _HEALTH[0])
    if not any(found.get(key) for key in _VERSION_KEYS):
        # Try an older path. If the instance still has it, it returns more fields.
        with suppress(InstanceError):
            found |= ask(client.get_json, _HEALTH[1])
    version = next((str(found[key]) for key in _VERSION_KEYS if found.get(key)), "")
    is_shared = found.get("multi_user") is True
    if is_shared and access.namespace:
        ask(client.list_experiments, page_size=1, namespace=access.namespace)
    return Health(version=version, is_shared=is_shared)
