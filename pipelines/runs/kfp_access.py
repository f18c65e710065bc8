"""Access to a KFP instance: endpoint, namespace and credentials.

Secrets come from files or the environment, never from the command line, which other users of the
machine can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.masking import HIDDEN, is_sent_openly

# The SDK's own variable takes precedence over the variable of its command line.
ENDPOINT = ("KF_PIPELINES_ENDPOINT", "KFP_ENDPOINT")
NAMESPACE = ("KFP_NAMESPACE",)
TOKEN = ("KFP_EXISTING_TOKEN",)
TOKEN_FILE = ("KF_PIPELINES_SA_TOKEN_PATH",)
COOKIES = ("KFP_COOKIES",)
CA_FILE = ("KFP_CA_FILE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
UI = ("FLOTILLA_KFP_UI",)
# File with a pod's service account token for KFP.
TOKEN_VOLUME = Path("/var/run/secrets/kubeflow/pipelines/token")
_LEAST_SECRET = 4
_NAMESPACE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A KFP instance, as the user specifies it. Missing values come from environment variables.

    Attributes:
        endpoint: URL of the instance (default: KF_PIPELINES_ENDPOINT, then KFP_ENDPOINT).
        namespace: the profile's namespace in multi-user mode (default: KFP_NAMESPACE).
        token_file: file with a bearer token (default: the token in KFP_EXISTING_TOKEN, then the
            file in KF_PIPELINES_SA_TOKEN_PATH, then the service account token of this pod).
        cookies_file: file with the session's Cookie header (default: KFP_COOKIES).
        ca_file: PEM file of the CA of the instance's certificate (default: KFP_CA_FILE, then
            SSL_CERT_FILE, then REQUESTS_CA_BUNDLE).
        ui: URL of the user interface (default: FLOTILLA_KFP_UI, then the endpoint if it serves it).
    """

    endpoint: str = ""
    namespace: str = ""
    token_file: str = ""
    cookies_file: str = ""
    ca_file: str = ""
    ui: str = ""

    def plain_http_remark(self, environment: Mapping[str, str] = os.environ) -> str:
        """Return a warning if credentials are sent unencrypted, or an empty string."""
        url = _url(_either(self.endpoint, ENDPOINT, environment).strip())
        variables = (*TOKEN, *TOKEN_FILE, *COOKIES)
        given = self.token_file or self.cookies_file or TOKEN_VOLUME.is_file()
        if not is_sent_openly(url) or not (given or any(map(environment.get, variables))):
            return ""
        return f"{url} is plain http: others on the network can read the credentials; use https"

    def access(self, environment: Mapping[str, str] = os.environ) -> Access:
        """Return the endpoint and the credentials. Raises `UserError`."""
        where = _either(self.endpoint, ENDPOINT, environment).strip()
        if not where:
            raise ConfigError(f"no KFP instance is given: add --endpoint URL, or set {ENDPOINT[0]}")
        cookies = _read_secret(self.cookies_file, "cookies file") if self.cookies_file else ""
        cookies = _either(cookies, COOKIES, environment)
        # Explicit values take precedence over the environment.
        token = "" if self.token_file else _either("", TOKEN, environment)
        file = _either(self.token_file, TOKEN_FILE, environment)
        if not (token or file or cookies) and TOKEN_VOLUME.is_file():
            file = str(TOKEN_VOLUME)
        access = Access(
            endpoint=_url(where),
            namespace=find_namespace(self.namespace, environment),
            token=token.strip(),
            token_file="" if token else file,
            cookies=cookies.strip(),
            ca_file=_either(self.ca_file, CA_FILE, environment),
            # Remove the fragment, such as `#/runs`, of a URL that was copied from a browser.
            ui=_url(_either(self.ui, UI, environment).strip().partition("#")[0]),
        )
        access.check()
        return access


@dataclass(frozen=True, kw_only=True)
class Access:
    """The address and credentials of an instance.

    Attributes:
        endpoint: URL of the instance with http:// or https://, without a trailing slash.
        namespace: the profile's namespace in multi-user mode, else empty.
        token: bearer token, or empty. A secret.
        token_file: file with a bearer token, read again for each request, or empty.
        cookies: value of the Cookie header, or empty. A secret.
        ca_file: PEM certificates for verifying the endpoint, or empty.
        ui: URL of the user interface, without a trailing slash, or empty.
    """

    endpoint: str
    namespace: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    cookies: str = field(default="", repr=False)
    ca_file: str = ""
    ui: str = ""

    def check(self) -> None:
        """Raise a `ConfigError` for an invalid value, before any request."""
        _check_url("the endpoint", self.endpoint)
        check_namespace(self.namespace)
        if self.ui:
            _check_url("--ui", self.ui)
        for name, value in (("the token", self.token), ("the cookies", self.cookies)):
            _check_header(name, value)
        if self.token_file and not self.token:
            self.read_token()
        if self.ca_file and not os.path.isfile(self.ca_file):
            raise ConfigError(f"--ca-file {self.ca_file}: the file does not exist")

    def has_token(self) -> bool:
        """Return whether requests have a bearer token."""
        return bool(self.token or self.token_file)

    def read_token(self) -> str:
        """Return the token, read from its file if necessary. Raises `UserError`."""
        if self.token:
            return self.token
        token = _read_secret(self.token_file, "token file")
        _check_header(f"the token in {self.token_file}", token)
        return token

    def mask(self, text: str) -> str:
        """Return `text` with all secrets masked."""
        secrets = [self.token, self.cookies]
        secrets += [part.partition("=")[2] for part in self.cookies.split(";")]
        if self.token_file and not self.token:
            try:
                secrets.append(self.read_token())
            except UserError:
                secrets.append("")
        for secret in secrets:
            # Do not mask a shorter value. It is not a secret, and ordinary words may contain it.
            if len(secret.strip()) >= _LEAST_SECRET:
                text = text.replace(secret.strip(), HIDDEN)
        return text


def is_named(endpoint: str = "", environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether an option or the environment specifies an instance."""
    return bool(endpoint or any(environment.get(name) for name in ENDPOINT))


def find_namespace(namespace: str = "", environment: Mapping[str, str] = os.environ) -> str:
    """Return the given namespace, or else the namespace from the environment, which may be ""."""
    return _either(namespace, NAMESPACE, environment)


def check_namespace(name: str) -> None:
    """Raise a `ConfigError` for an invalid namespace name. An empty name is allowed."""
    if name and not _NAMESPACE_NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not the name of a namespace (--namespace or {NAMESPACE[0]}): use up to "
            "63 lowercase letters, digits and '-'"
        )


def _either(given: str, names: tuple[str, ...], environment: Mapping[str, str]) -> str:
    return given or next((environment[name] for name in names if environment.get(name)), "")


def _url(text: str) -> str:
    """Add `https://` to a URL without a scheme, as the SDK does, and remove a trailing slash."""
    return (text if "://" in text or not text else f"https://{text}").rstrip("/")


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        wrong, parts = True, urlsplit("")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{name} contains a user or password: leave them out, and pass a token or cookies in a "
            f"file or in {TOKEN[0]} or {COOKIES[0]}"
        )
    if wrong or parts.query or parts.fragment or any(c.isspace() for c in url):
        raise ConfigError(
            f"{name} {url!r} is not the URL of a KFP instance, "
            "such as https://kfp.example.com or http://localhost:8888"
        )


def _check_header(name: str, value: str) -> None:
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{name} cannot be sent, because not every character is printable ASCII")


def _read_secret(path: str, what: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"the {what} {path} is not a text file") from None
    if not text:
        raise ConfigError(f"the {what} {path} is empty")
    return text


def describe_no_page(endpoint: str) -> str:
    """Return the message to show instead of a link if the user interface is unknown."""
    return (
        f"no link: {endpoint} serves only the API; set the URL of the user interface with --ui "
        f"or {UI[0]}"
    )
