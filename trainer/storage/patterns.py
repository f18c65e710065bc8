"""Patterns of file names: `*`, `?`, `**`, `[ab]`, `{a,b}`, `{SPAN}` and `{DATE}`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.uri import OPTIONS, SCHEMES, join, local_path, require_uri, uri_of

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


def below(source: str, path: str, split: str) -> Pattern:
    """Return the pattern of a split's files. `path` is relative to `source`, or absolute."""
    key = f"data.splits.{split}"
    if "://" in path or path.startswith(("/", "~")):
        return parse(key, path)
    query = _QUERY.search(source) if "://" in source else None
    place, options = (source[: query.start()], source[query.start() :]) if query else (source, "")
    return parse(key, f"{place.rstrip('/')}/{path}{options}")


def parse(key: str, text: str) -> Pattern:
    """Parse a pattern. Raises `ConfigError`, which names the key."""
    if is_local(text):
        path = _path(key, text)
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
    return Pattern(key, text, uri, _expression(key, text, rest_) if rest_ else None)


def _is_special(parts: list[str], text: str) -> bool:
    there = is_local(text) and os.path.lexists(f"/{'/'.join(parts)}")
    return bool(_SPECIAL.search(parts[-1])) and not there


def _path(key: str, text: str) -> str:
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


def _expression(key: str, text: str, pattern: str) -> re.Pattern[str]:
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
