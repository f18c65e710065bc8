"""Storage URIs: `file:///path` (percent-encoded), `gs://`, `s3://` and `minio://`.

Also the endpoint and the credentials of the S3-compatible store that a URI names, and patterns of
file names: `*`, `?`, `**`, `[ab]`, `{a,b}`, `{SPAN}` and `{DATE}`.

A new scheme needs an entry in `SCHEMES` and a class like `gcs.GcsBucket` that `publishing._bucket`
creates. It also needs a row for its login in `pipelines/doctor/machine.py`, and one for its name in
KFP's user interface in `pipelines/runs/kfp_run.py`.

Keys in buckets are not encoded, except for `%25` and `%3F`, because a question mark begins the
options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlsplit

from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.runtime.masking import find_credentials, is_sent_openly

#: Every scheme, with the protocol of its stores.
SCHEMES = {"file": "file", "gs": "gcs", "s3": "s3", "minio": "s3"}
_IN_BUCKETS = [f"{scheme}://" for scheme in SCHEMES if scheme != "file"]
FORMS = f"file:///path, {', '.join(_IN_BUCKETS[:-1])} or {_IN_BUCKETS[-1]}"
# Options that KFP and the Go CDK write. Those that have no effect here are also accepted.
OPTIONS = (
    "endpoint", "region", "disableSSL", "disable_https", "s3ForcePathStyle", "use_path_style",
    "hostname_immutable", "awssdk",
)  # fmt: skip
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
# Refuse control characters, because a URI must fit on one line of logs and tables.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Maximum lengths of a key, a path and a name that all object stores and Linux accept.
_MOST_KEY, _MOST_PATH, _MOST_NAME = 1024, 4095, 255


@dataclass(frozen=True)
class Location:
    """A location in a bucket. `key` is empty for the bucket itself."""

    scheme: str
    bucket: str
    key: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def home(self) -> str:
        """The URI of the bucket, without options."""
        return f"{self.scheme}://{self.bucket}"

    def option(self, *names: str) -> str:
        """Return the value of the first of these options that is set, or an empty string."""
        found = dict(self.options)
        return next((found[name] for name in names if found.get(name)), "")

    def is_on(self, *names: str) -> bool:
        """Return the truth value of the first of these options that is set, or False."""
        return self.option(*names).lower() in ("true", "1", "yes")


def find_scheme(uri: str) -> str:
    """Return the scheme of `uri`. Raises `UserError` unless it is a URI with a known scheme."""
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme not in SCHEMES or not rest:
        raise UserError(f"{_strip_query(uri)!r} is not a storage URI; write it as {FORMS}")
    return scheme


def is_uri(text: str) -> bool:
    """Return whether a string begins with a known scheme that is followed by a path or bucket."""
    return any(re.match(f"{re.escape(start)}[^/]", text) for start in ("file:///", *_IN_BUCKETS))


def speaks_s3(text: str) -> bool:
    """Return whether a string is the URI of an S3-compatible store."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and SCHEMES.get(scheme) == "s3"


def locate(uri: str) -> Location:
    """Return the bucket, key and options of a URI. Raises `UserError` if it is invalid."""
    scheme = find_scheme(uri)
    rest, _, query = uri.removeprefix(f"{scheme}://").partition("?")
    bucket, _, path = rest.partition("/")
    # Omit the query from the URI in messages, because an invalid option may be a secret.
    bare = _strip_query(uri)
    if not _BUCKET.fullmatch(bucket):
        raise UserError(f"{bare!r} is not a storage URI: {bucket!r} is not the name of a bucket")
    return Location(scheme, bucket, _check_key(bare, path), _options(scheme, bare, query))


def join(uri: str, *parts: str) -> str:
    """Append names or relative paths to the path of `uri`. Raises `UserError` for a bad name."""
    names = [name for part in parts for name in _names(part)]
    scheme = find_scheme(uri)
    rest = uri.removeprefix(f"{scheme}://")
    mark = query = ""
    if scheme == "file":
        names = [quote(os.fsencode(name)) for name in names]
    else:
        names = [name.replace("%", "%25").replace("?", "%3F") for name in names]
        # Insert the names before the options, such as the endpoint in KFP's pipeline root.
        rest, mark, query = rest.partition("?")
    return f"{scheme}://" + "/".join([rest.rstrip("/"), *names]) + mark + query


def split_names(text: str) -> list[str]:
    """Return the names in the path of a URI, decoded once, as they were given to `join`.

    Any other string is split at its slashes.
    """
    scheme, mark, rest = text.partition("://")
    if not mark or scheme not in SCHEMES:
        return text.split("/")
    if scheme == "file":
        return os.fsdecode(unquote_to_bytes(rest)).split("/")
    return [_plain(name) for name in rest.partition("?")[0].split("/")]


def parent_of(uri: str) -> str:
    """Return the URI without the last component of its path."""
    # A file URI has no options.
    path, mark, query = (uri, "", "") if find_scheme(uri) == "file" else uri.partition("?")
    return path.rstrip("/").rpartition("/")[0] + mark + query


def name_of(uri: str) -> str:
    """Return the last name in the path of a URI, as it was given to `join`."""
    path = local_path(uri)
    return path.name if path else locate(uri).key.rpartition("/")[2]


def local_path(uri: str) -> Path | None:
    """Return the path of a `file://` URI, or None. Raises `UserError` for an invalid URI."""
    if find_scheme(uri) != "file":
        return None
    text = uri.removeprefix("file://").removeprefix("localhost")
    raw = unquote_to_bytes(text)
    if not raw.startswith(b"/") or b"\0" in raw:
        raise UserError(f"{uri!r} is not a storage URI: write it as file:///absolute/path")
    if "\\" in uri:
        raise UserError(f"{uri!r} is not a storage URI: it contains a backslash; use /")
    names = raw[1:].rstrip(b"/").split(b"/") if raw.strip(b"/") else []
    too_long = len(raw) > _MOST_PATH or any(len(name) > _MOST_NAME for name in names)
    _refuse_path(uri, [os.fsdecode(name) for name in names], too_long=too_long)
    return Path(os.fsdecode(raw))


def check_path(uri: str) -> None:
    """Raise `UserError` unless stores accept the path and the options of a URI."""
    if local_path(uri) is None:
        bare = _strip_query(uri)
        _check_key(bare, bare.partition("://")[2].partition("/")[2])
        _options(find_scheme(uri), bare, uri.partition("?")[2])


def require_uri(option: str, value: str) -> None:
    """Raise a `ConfigError` that names the option unless its value is a valid storage URI."""
    try:
        if local_path(value) is None:
            locate(value)
    except UserError as error:
        raise ConfigError(f"{option}: {error}") from None


def uri_of(path: str | Path) -> str:
    """Return the `file://` URI of a path. Raises `ConfigError` if the working folder is gone."""
    try:
        absolute = "/" + os.path.abspath(path).lstrip("/")
    except FileNotFoundError:
        raise ConfigError("the current folder was removed; change to an existing folder") from None
    return "file://" + quote(os.fsencode(absolute))


def _check_key(bare: str, path: str) -> str:
    path = path.rstrip("/")
    names = [_plain(name) for name in path.split("/")] if path else []
    key = "/".join(names)
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise UserError(f"{bare!r} is not a storage URI: it is not UTF-8") from None
    _refuse_path(bare, names, too_long=size > _MOST_KEY)
    return key


def _refuse_path(uri: str, names: list[str], *, too_long: bool) -> None:
    if too_long:
        raise UserError(
            f"{uri[:100]!r}... is not a storage URI: its path is too long; use shorter names"
        )
    if any(name in ("", ".", "..") for name in names):
        raise UserError(f"{uri!r} is not a storage URI: its path has an empty part, '.' or '..'")
    if _CONTROL.search(uri):
        raise UserError(f"{uri!r} is not a storage URI: it contains a control character")


def web_address(text: str, where: str) -> str:
    """Return `text` if it is a server's URL. Otherwise raise a `ConfigError` that names `where`."""
    if why := find_credentials(text):
        raise ConfigError(
            f"{where}: {why}; remove the credentials, and set them in environment variables"
        )
    try:
        parts = urlsplit(text)
        right = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        right = False
    if not right or not text.isprintable() or " " in text:
        said = repr(text) if "@" not in text else "its value"
        raise ConfigError(
            f"{where}: {said} is not the address of a store; write it as http://host:port"
        )
    return text


def _names(part: str) -> list[str]:
    names = part.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise UserError(f"{part!r} is not a plain name or a relative path below a URI")
    return names


def _plain(name: str) -> str:
    return re.sub("%25|%3F|%3f", lambda found: "%" if found[0] == "%25" else "?", name)


def _options(scheme: str, bare: str, query: str) -> tuple[tuple[str, str], ...]:
    if query and scheme == "gs":
        raise UserError(f"{bare!r}: gs:// takes no options; set STORAGE_EMULATOR_HOST instead")
    found = parse_qsl(query, keep_blank_values=True)
    for name, value in found:
        if name not in OPTIONS:
            hint = nearest(name, OPTIONS) or f" (one of {', '.join(OPTIONS)})"
            raise UserError(f"{bare!r}: {name!r} is not an option of a storage URI{hint}")
        if "@" in value:
            raise UserError(
                f"{bare!r}: a URI must not contain credentials, because it appears in logs; set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
    return tuple(found)


def _strip_query(uri: str) -> str:
    # Leave out the query, because it may contain a secret if the URI is mistyped.
    return uri.partition("?")[0]


# The object store of a KFP instance in the namespace `kubeflow`.
KFP_ENDPOINT = "http://seaweedfs.kubeflow:9000"
# The Kubernetes secret for KFP's object store, and the names of the keys in the secret.
KFP_SECRET = "mlpipeline-minio-artifact"
KFP_KEYS = ("accesskey", "secretkey")
BOTO_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Environment variables that select credentials other than KFP's secret: a key, a role or a profile.
_OTHERS = (
    BOTO_KEYS[0], "AWS_PROFILE", "AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)  # fmt: skip
_AMAZON = re.compile(r"\.amazonaws\.com(\.cn)?$")
_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


@dataclass(frozen=True)
class Endpoint:
    """The connection settings of a store. For empty fields, boto3 chooses a value.

    `kfp_secret` indicates whether the keys of KFP's secret may be used: for `minio://`, and for
    `s3://` with an endpoint that is not Amazon's.
    """

    url: str = ""
    region: str = ""
    path_style: bool = False
    kfp_secret: bool = False


def find_endpoint(location: Location) -> Endpoint:
    """Return the endpoint from the URI or, failing that, from the environment or the default."""
    minio = location.scheme == "minio"
    given = {f"the endpoint of {location.home}": _add_scheme(location)}
    given |= {name: os.environ.get(name, "") for name in _VARIABLES}
    found = next((web_address(url, where) for where, url in given.items() if url), "")
    url = found or (KFP_ENDPOINT if minio else "")
    return Endpoint(
        url=url,
        region=location.option("region"),
        path_style=bool(url) or location.is_on("s3ForcePathStyle", "use_path_style"),
        kfp_secret=minio or (bool(url) and not _AMAZON.search(urlsplit(url).hostname or "")),
    )


def plain_http_remark(uri: str) -> str:
    """Return a warning if data at a URI is sent unencrypted, or an empty string."""
    if not speaks_s3(uri):
        return ""
    url = find_endpoint(locate(uri)).url
    if url == KFP_ENDPOINT or not is_sent_openly(url):
        return ""
    return (
        f"{url} uses plain HTTP: others on the network can read the data and session tokens; "
        "use https"
    )


def kfp_credentials() -> Mapping[str, str]:
    """Return the keys of KFP's secret, or {} if the environment selects other credentials."""
    keys = [os.environ.get(name, "") for name in KFP_KEYS]
    if not all(keys) or any(map(os.environ.get, _OTHERS)):
        return {}
    return {"aws_access_key_id": keys[0], "aws_secret_access_key": keys[1]}


def _add_scheme(location: Location) -> str:
    endpoint = location.option("endpoint")
    if not endpoint or "://" in endpoint:
        return endpoint
    plain = location.is_on("disableSSL", "disable_https")
    return f"{'http' if plain else 'https'}://{endpoint}"


SPAN, DATE = "{SPAN}", "{DATE}"
_SPECIAL = re.compile(r"[*?\[{]")
_SPAN = r"(?P<span>[0-9]+)"
_DATE = (
    r"(?P<year>[0-9]{4})(?:-(?P<m1>[0-9]{2})-(?P<d1>[0-9]{2})|/(?P<m2>[0-9]{2})/(?P<d2>[0-9]{2})|"
    r"(?P<m3>[0-9]{2})(?P<d3>[0-9]{2}))"
)
_QUERY = re.compile(rf"\?(?=(?:{'|'.join(OPTIONS)})=)")


@dataclass(frozen=True)
class Match:
    """The match of a path. `span` is normalized, and `written` is the span as written in the path.

    `is_below` indicates whether the pattern matches a parent folder of the path.
    """

    span: str
    is_below: bool
    written: str = ""


@dataclass(frozen=True)
class Pattern:
    """A pattern of the files below a folder.

    Attributes:
        key: the configuration key, for messages.
        root: URI of the folder before the first wildcard, or of the file if there is none.
        expression: the regular expression for paths below the root, or None to match all.
    """

    key: str
    text: str
    root: str
    expression: re.Pattern[str] | None

    def match(self, path: str) -> Match | None:
        """Match a path relative to the root. Return None if it does not match."""
        if self.expression is None:
            return Match("", is_below=False)
        found = self.expression.fullmatch(path)
        if not found:
            return None
        span = _span({name: text or "" for name, text in found.groupdict().items()})
        if span is None:
            return None
        return Match(span, is_below=bool(found["below"]), written=_format_span(found))


def is_local(source: str) -> bool:
    """Return whether a source is in the local file system."""
    return "://" not in source or source.startswith("file:")


def split_pattern(source: str, path: str, split: str) -> Pattern:
    """Return the pattern of a split's files. `path` is relative to `source`, or absolute."""
    key = f"data.splits.{split}"
    if "://" in path or path.startswith(("/", "~")):
        return parse_pattern(key, path)
    query = _QUERY.search(source) if "://" in source else None
    place, options = (source[: query.start()], source[query.start() :]) if query else (source, "")
    return parse_pattern(key, f"{place.rstrip('/')}/{path}{options}")


def parse_pattern(key: str, text: str) -> Pattern:
    """Parse a pattern. Raises `ConfigError`, which names the key."""
    if is_local(text):
        path = _expand(key, text)
        parts = ("" if os.path.lexists(path) else path.strip("/")).split("/")
        base = uri = uri_of(path if parts == [""] else "/")
        options = ""
    else:
        scheme, _, rest = text.partition("://")
        if scheme not in SCHEMES:
            raise ConfigError(
                f"{key}: {text!r} is neither a path nor a URI of a store ({', '.join(SCHEMES)})"
            )
        query = _QUERY.search(rest)
        rest, options = (rest[: query.start()], rest[query.start() :]) if query else (rest, "")
        bucket, _, inside = rest.partition("/")
        parts = inside.rstrip("/").split("/")
        base = uri = f"{scheme}://{bucket}"
    plain = next((n for n in range(len(parts)) if _is_special(parts[: n + 1], text)), len(parts))
    fixed = [part for part in parts[:plain] if part]
    if is_local(text):
        uri = join(base, *fixed) if fixed else base
    else:
        uri = "/".join([base, *fixed]) + options
    require_uri(key, uri)
    rest_ = "/".join(parts[plain:])
    return Pattern(key, text, uri, _compile(key, text, rest_) if rest_ else None)


def _is_special(parts: list[str], text: str) -> bool:
    there = is_local(text) and os.path.lexists(f"/{'/'.join(parts)}")
    return bool(_SPECIAL.search(parts[-1])) and not there


def _expand(key: str, text: str) -> str:
    if text.startswith("file:"):
        require_uri(key, text)
        return str(local_path(text))
    if "\0" in text:
        raise ConfigError(f"{key}: a path must not contain a NUL character")
    try:
        expanded = Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{key}: the user in {text!r} has no home folder") from None
    try:
        return os.path.abspath(expanded)
    except FileNotFoundError:
        raise ConfigError("the current folder was removed; change to an existing folder") from None


def _compile(key: str, text: str, pattern: str) -> re.Pattern[str]:
    if pattern.count(SPAN) + pattern.count(DATE) > 1:
        raise ConfigError(f"{key}: {text!r} contains more than one {SPAN} or {DATE}; keep only one")
    try:
        return re.compile(_to_expression(pattern) + "(?P<below>/.*)?", re.DOTALL)
    except (re.error, UserError) as error:
        raise ConfigError(f"{key}: {text!r} is not a valid pattern: {error}") from None


def _to_expression(pattern: str) -> str:
    found, at = "", 0
    while at < len(pattern):
        token, text = _token(pattern, at)
        found += text
        at += len(token)
    return found


def _token(pattern: str, at: int) -> tuple[str, str]:
    rest = pattern[at:]
    for token, expression in (
        (SPAN, _SPAN), (DATE, _DATE), ("**/", "(?:.*/)?"), ("**", ".*"), ("*", "[^/]*"),
        ("?", "[^/]"),
    ):  # fmt: skip
        if rest.startswith(token):
            return token, expression
    if choice := re.match(r"\[(!?)([^/\]]+)\]", rest):
        inside = re.sub(r"([\\\[\]&~|^])", r"\\\1", choice[2])
        return choice[0], f"(?!/)[{'^' if choice[1] else ''}{inside}]"
    if rest[0] == "{":
        choices, token = _braces(rest)
        if len(choices) == 1:
            raise UserError(f"{token} is unknown; write {SPAN}, {DATE} or {{a,b}}")
        return token, f"(?:{'|'.join(map(_to_expression, choices))})"
    return rest[0], re.escape(rest[0])


def _braces(text: str) -> tuple[list[str], str]:
    depth, start, found = 0, 1, []
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0 or (depth == 1 and letter == ","):
            found.append(text[start:at])
            start = at + 1
        if depth == 0:
            return found, text[: at + 1]
    raise UserError("a brace is not closed")


def _format_span(found: re.Match[str]) -> str:
    there = [name for name in found.groupdict() if name != "below" and found[name]]
    if not there:
        return ""
    return found.string[min(map(found.start, there)) : max(map(found.end, there))]


def _span(groups: dict[str, str]) -> str | None:
    if groups.get("span"):
        return str(int(groups["span"]))
    if not groups.get("year"):
        return ""
    month = groups["m1"] or groups["m2"] or groups["m3"]
    day = groups["d1"] or groups["d2"] or groups["d3"]
    try:
        return date(int(groups["year"]), int(month), int(day)).isoformat()
    except ValueError:
        return None
