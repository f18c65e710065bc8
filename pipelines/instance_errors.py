"""What a KFP instance refuses, or does not answer, in one line: what, where, what to do."""

from __future__ import annotations

import json
import ssl
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from pipelines.access import Access
from trainer.errors import UserError

# Of what an instance says; it likes to add a stack of calls.
MOST_WORDS = 300
_RENEW = "renew the token or cookies (--token-file, --cookies-file, KFP_EXISTING_TOKEN)"
_REMEDIES = {
    400: "mend what it names; an instance for several users asks for --namespace",
    401: f"it does not know who asks, or no longer: {_RENEW}",
    403: "it knows who asks and does not allow it: name your --namespace, or ask its owner",
    404: "check --endpoint and the name or id; it has to be the instance's root",
    405: "check --endpoint: this is no KFP API",
    409: "it is there already, or was changed by another at the same time: look, then try again",
    413: "it is too large for the instance or the proxy in front of it",
    429: "it is asked too much: try again later",
}
_REDIRECTED = 3
_SERVER = 500


class InstanceError(UserError):
    """A KFP instance refused a request, or gave no answer.

    Attributes:
        status: the HTTP status, or 0 where there was no answer that can be read.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        """Keep the line and the status."""
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the same request may well succeed a little later."""
        return self.status in (0, 429) or self.status >= _SERVER


def refused(access: Access, where: str, error: Any) -> InstanceError:
    """Return what a status outside 200 to 299 means; `error` is the client's `ApiException`."""
    status = int(error.status or 0)
    words = _words(access, error)
    said = f"{access.endpoint} answered {status} {error.reason or ''}".rstrip()
    if words:
        said += f" ({words})"
    if status // 100 == _REDIRECTED:
        remedy = _redirected(access, error)
    elif status >= _SERVER:
        remedy = "the instance or a proxy before it is in trouble: try again, or ask its owner"
    else:
        remedy = _REMEDIES.get(status, "check --endpoint")
    return InstanceError(f"{said} to {where}: {remedy}", status)


def no_answer(access: Access, where: str, error: Exception) -> InstanceError:
    """Return what a connection that failed, or stayed silent, means."""
    cause: BaseException = error
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason:
        cause = error.reason
    host = urlsplit(access.endpoint).netloc
    if isinstance(cause, urllib3.exceptions.SSLError | ssl.SSLError):
        return InstanceError(_tls(access, host, cause))
    if isinstance(cause, NameResolutionError):
        return InstanceError(f"the host of {access.endpoint} is not known: check --endpoint")
    if isinstance(cause, NewConnectionError):
        return InstanceError(
            f"{host} takes no connection: check --endpoint; for a port forward: "
            "`kubectl port-forward -n kubeflow svc/ml-pipeline 8888:8888`"
        )
    if isinstance(cause, ConnectTimeoutError):
        return InstanceError(
            f"{host} cannot be reached, it is silent: check --endpoint, VPN, proxy"
        )
    if isinstance(cause, urllib3.exceptions.TimeoutError):
        return InstanceError(f"{host} does not answer {where}, it hangs: try again, ask its owner")
    return InstanceError(
        f"{host} broke the connection at {where}: try again; check http:// and https://"
    )


def no_end(access: Access, where: str) -> InstanceError:
    """Return what an answer that does not come to its end means."""
    host = urlsplit(access.endpoint).netloc
    return InstanceError(f"{host} does not come to an end with {where}: try again, ask its owner")


def no_json(access: Access, where: str, answer: Any) -> InstanceError:
    """Return what an answer that is not JSON means; it is a login page, as a rule."""
    kind = (answer.getheader("content-type") or "nothing").partition(";")[0]
    return InstanceError(
        f"{access.endpoint} answered {where} with {kind} where JSON is due, "
        f"such as a login page: check --endpoint, or {_RENEW}"
    )


def strange_answer(access: Access, where: str) -> InstanceError:
    """Return what JSON of another kind means."""
    return InstanceError(
        f"{access.endpoint} answered {where} with what no KFP instance says: check --endpoint"
    )


def _tls(access: Access, host: str, cause: BaseException) -> str:
    words = " ".join(str(cause).split())
    if "NO_CERTIFICATE" in words or "PEM" in words:
        return f"{access.ca_file} holds no certificate in PEM: name another by --ca-file"
    if "certificate" in words.lower():
        reason = words.rpartition("failed: ")[2].partition(" (_ssl")[0]
        return f"the certificate of {host} is not trusted ({reason}): name its CA by --ca-file"
    return f"{host} speaks no TLS: check the port, or give --endpoint with http://"


def _redirected(access: Access, error: Any) -> str:
    target = urlsplit((error.headers or {}).get("location", ""))
    place = f"{target.scheme}://{target.netloc}" if target.netloc else target.path
    if target.netloc and target.netloc != urlsplit(access.endpoint).netloc:
        return f"it sends elsewhere, to {place}: a login, so {_RENEW}"
    if target.scheme == "https" and access.endpoint.startswith("http:"):
        return f"give --endpoint with https://: {place}"
    return f"it sends to {place}, such as a login: {_RENEW}"


def _words(access: Access, error: Any) -> str:
    """Return what the instance says in its own words, cut, without secrets; none of a page."""
    body = error.body
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        tree = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(tree, dict):
        return ""
    said = tree.get("message") or tree.get("error_message") or tree.get("error") or ""
    line = access.masked(" ".join(str(said).split()))
    # What would move the cursor, or change colours, is no word.
    line = "".join(letter for letter in line if letter.isprintable())
    return line if len(line) <= MOST_WORDS else f"{line[:MOST_WORDS]}..."
