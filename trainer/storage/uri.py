"""Names of stored things: `file:///path`, percent-encoded, or `gs://`, `s3://`, `minio://`."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote_to_bytes

from trainer.errors import UserError

SCHEMES = ("file", "gs", "s3", "minio")


def scheme_of(uri: str) -> str:
    """Return the scheme of `uri`; raises `UserError` for what is no URI of a known scheme."""
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme not in SCHEMES or not rest:
        forms = "file:///path, gs://, s3:// or minio://"
        raise UserError(f"{uri!r} is not a storage URI: write it as {forms}")
    return scheme


def join(uri: str, *parts: str) -> str:
    """Return the URI of `parts` below `uri`; a part is a plain name or a relative path of names.

    Raises:
        UserError: a part is empty, absolute, or climbs out of `uri`.
    """
    names = [name for part in parts for name in _names(part)]
    scheme = scheme_of(uri)
    rest = uri.removeprefix(f"{scheme}://")
    mark = query = ""
    if scheme == "file":
        names = [quote(os.fsencode(name)) for name in names]
    else:
        # A KFP root may carry the endpoint of its store behind a question mark.
        rest, mark, query = rest.partition("?")
    return f"{scheme}://" + "/".join([rest.rstrip("/"), *names]) + mark + query


def local_path(uri: str) -> Path | None:
    """Return the path that a `file://` URI stands for, and None for every other scheme."""
    if scheme_of(uri) != "file":
        return None
    text = uri.removeprefix("file://").removeprefix("localhost")
    path = os.fsdecode(unquote_to_bytes(text))
    if not path.startswith("/") or "\0" in path:
        raise UserError(f"{uri!r} is not a storage URI: a file URI is file:///absolute/path")
    return Path(path)


def uri_of(path: str | Path) -> str:
    """Return the `file://` URI of a path, made absolute; symbolic links stay as they are."""
    absolute = "/" + os.path.abspath(path).lstrip("/")
    return "file://" + quote(os.fsencode(absolute))


def _names(part: str) -> list[str]:
    names = part.split("/")
    if any(name in ("", ".", "..") for name in names):
        raise UserError(f"{part!r} is not a plain name or a relative path below a URI")
    return names
