"""Masks credentials, and escapes characters that control a terminal or a page.

A configuration or command line that contains credentials is rejected. Library messages, and names
and text from data, pass through `mask`, `printable` or `one_line` before they reach a terminal, a
log or a page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import quote, urlsplit

HIDDEN = "***"
# Environment variables of other programs that contain secrets.
VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "secretkey", "KFP_EXISTING_TOKEN", "KFP_COOKIES",
    "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD",
)  # fmt: skip
_LEAST_SECRET = 8
# In the URI of a bucket, a colon always precedes a secret, which may contain slashes. In other
# URIs, it may precede a port.
_IN_AUTHORITY = re.compile(
    r"""(?P<scheme>(?:gs|s3|minio)://)(?:[^\s'"<>\\/?\#]*(?:@|%40)|[^\s'"<>\\/?\#@]*(?::|%3A)[^\s'"<>\\?\#]+(?:@|%40)?)
      | (?P<other>[a-z][a-z0-9+.-]*://|[?&]endpoint=)(?:[^\s'"<>\\/?\#]*(?:@|%40)
            |[^\s'"<>\\/?\#@:]+:(?!\d+(?:[/?\#\s'"]|$))[^\s'"<>\\?\#@]*@)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_OF_SECRETS = r"""(?:[\w.-]*[_.-])?(?:token|secret|password|passwd|pwd|credentials?)
        |(?:api|access|secret|account|private)[_.-]?key"""
_IN_QUERY = re.compile(
    rf"""(?P<name>[?&;\#](?:amp;)?(?:x-amz-(?:signature|credential|security-token)
        |x-goog-(?:signature|credential)|googleaccessid|awsaccesskeyid|signature|sig
        |{_OF_SECRETS})=)(?P<value>[^\s&;'"<>\\\#]+)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_NAME = re.compile(rf"{_OF_SECRETS}|\w+_(?:{_OF_SECRETS})", re.IGNORECASE | re.VERBOSE)
_IN_HEADER = re.compile(
    r"""(?P<name>\b(?:(?:proxy-)?authorization|(?:set-)?cookie|x-amz-security-token|x-api-key
        |aws_secret_access_key)
        ['"\\]*\s*[:=]\s*(?:[bu]?\\?['"])?)(?P<value>[^'"\\\r\n]+)
      | (?P<kind>\bbearer\s+)(?P<token>[\w.~+/=-]{8,})
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Characters that move the cursor of a terminal, change its colors or title, reverse the text
# direction, or are invisible. The two joiners for emoji and some scripts are allowed.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BREAKS = re.compile("[\t-\r\x85\u2028\u2029]+")


def printable(text: str) -> str:
    """Escape the characters in `text` that control a terminal or a page.

    Newlines and tabs are kept.
    """
    if text.isascii() and text.isprintable():
        return text
    return _COMMANDS.sub(_escape, text.replace("\r\n", "\n"))


def one_line(text: str) -> str:
    """Return `text` on one line, without credentials and surrounding spaces."""
    return join_lines(text).strip()


def join_lines(text: str) -> str:
    """Mask `text`, and replace newlines with spaces, so that it stays on one line."""
    return mask(_BREAKS.sub(" ", text))


def _escape(found: re.Match[str]) -> str:
    # Use JSON escapes, so that a JSON document keeps its meaning.
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def find_credentials(text: str) -> str:
    """Return a clause that describes credentials in the URIs of a text, or an empty string."""
    if "://" not in text:
        return ""
    if _IN_AUTHORITY.search(text):
        return "a URI contains a user name or password"
    if signed := _IN_QUERY.search(text):
        return f"a URI contains a secret ({signed['name'].strip('?&;#=')})"
    return ""


def names_secret(name: str) -> bool:
    """Return whether the name of a variable suggests that its value is secret."""
    return name in VARIABLES or bool(_SECRET_NAME.fullmatch(name))


def mask(text: str) -> str:
    """Return `text` with credentials masked and control characters escaped."""
    return printable(remove_credentials(text))


def remove_credentials(text: str) -> str:
    """Return `text` with credentials masked, and otherwise unchanged."""
    if "://" in text:
        text = _IN_AUTHORITY.sub(_mask_user, text)
    if "=" in text or ":" in text or " " in text:
        text = _IN_QUERY.sub(rf"\g<name>{HIDDEN}", text)
        text = _IN_HEADER.sub(_mask_value, text)
    for secret in _environment_secrets():
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


def is_sent_openly(url: str) -> bool:
    """Return whether requests to a URL would leave the cluster over plain HTTP."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme != "http" or host.endswith((".svc", ".svc.cluster.local", ".localhost")):
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return "." in host


def _mask_user(found: re.Match[str]) -> str:
    # Keep the final `@` (or `%40`), which may be missing in the URI of a bucket.
    return f"{found['scheme'] or found['other']}{HIDDEN}" + ("@" if found[0][-1] in "@0" else "")


def _mask_value(found: re.Match[str]) -> str:
    return f"{found['name'] or found['kind']}{HIDDEN}"


def _environment_secrets() -> Iterator[str]:
    for name in VARIABLES:
        value = os.environ.get(name, "")
        # Do not mask shorter values, because they may be part of ordinary words.
        if len(value) >= _LEAST_SECRET:
            yield value
            if (encoded := quote(value, safe="")) != value:
                yield encoded
