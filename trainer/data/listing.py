"""List the files of a source by name, without reading them and without TensorFlow.

A source is the URI or path of a file or folder, or a pattern: `*` and `?` within a name, `**`
across folders, `[ab]`, `{a,b}`, and at most one `{SPAN}` (an integer) or `{DATE}` (2026-11-23,
20261123 or 2026/11/23), which is the span of a file. Hidden files are left out: files with a name,
or in a folder, that begins with a dot or an underscore, and checksum files (`.crc`).

A changed file is detected by its size and its tag. In a bucket, the tag is a checksum, so a file
that is stored again with the same content is unchanged. On disk, the tag is the modification time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.config.data import ALL, NEWEST, SINCE_CHAMPION, DataConfig
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.storage.publishing import choose_store
from flotilla.trainer.storage.uri import DATE, SPAN, Pattern, parse_pattern, split_pattern

SCHEMA = 1
KIND = "listing"
_FILE = "listing.json.gz"
_PROGRESS = 100_000
# With a smaller average file size, in bytes, reading is much slower than from larger files.
_SMALL = 16 << 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of a source. Its size is in bytes.

    Attributes:
        root: URI of the listed folder. `path` is the path of the file below it.
        tag: a value that changes with the content.
        span: span of the file, such as 17 or 2026-11-23, or empty if it has none.
        split: split whose pattern in `data.splits` matches, or empty if none does.
    """

    root: str
    path: str
    size: int
    tag: str
    span: str = ""
    split: str = ""

    @property
    def uri(self) -> str:
        """The URI of the file."""
        return storage.join(self.root, self.path)


@dataclass(frozen=True)
class Listing:
    """The files of a source, sorted by span and path, and counts of its hidden files by suffix."""

    root: str
    files: tuple[SourceFile, ...]
    hidden: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """A digest of the files' names, contents and splits, independent of location and order."""
        return _digest(self.files)

    @cached_property
    def spans(self) -> Mapping[str, str]:
        """The digest of each span, oldest span first. Files without a span are not included."""
        found: dict[str, list[SourceFile]] = {}
        for file in self.files:
            if file.span:
                found.setdefault(file.span, []).append(file)
        return {span: _digest(found[span]) for span in sorted(found, key=span_order)}

    @property
    def roots(self) -> list[str]:
        """The root folders of the files."""
        return sorted({file.root for file in self.files})

    def to_json(self) -> bytes:
        """Return the listing as compressed JSON, with one short row per file."""
        number = {root: place for place, root in enumerate(self.roots)}
        rows = [[number[f.root], f.path, f.size, f.tag, f.span, f.split] for f in self.files]
        tree = {"schema": SCHEMA, "root": self.root, "roots": self.roots, "files": rows}
        tree |= {"hidden": dict(self.hidden)} if self.hidden else {}
        text = json.dumps(tree, separators=(",", ":"), ensure_ascii=True)
        # Omit the timestamp, so that equal listings give equal bytes.
        return gzip.compress(text.encode(), mtime=0)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Listing:
        """Parse the result of `to_json`. Raises `UserError` with `where` as the location."""
        try:
            tree: Any = parse(gzip.decompress(data))
            if tree["schema"] != SCHEMA:
                raise ValueError("another schema")
            roots = [str(root) for root in tree["roots"]]
            files = (
                SourceFile(roots[root], str(path), int(size), str(tag), str(span), str(split))
                for root, path, size, tag, span, split in tree["files"]
            )
            return cls(str(tree["root"]), tuple(files), dict(tree.get("hidden", {})))
        except (
            OSError, EOFError, zlib.error, LookupError, TypeError, ValueError, AttributeError,
            OverflowError,
        ) as error:  # fmt: skip
            raise UserError(
                f"{where} is not a listing of this version ({error}); leave data.version empty to "
                "list the current files"
            ) from None


def span_order(span: str) -> tuple[int, str]:
    """Return a sort key that puts integers in numerical order and dates in time order."""
    return len(span), span


def list_source(config: DataConfig) -> Listing:
    """Return all files of `data.source`, regardless of `data.spans`. Raises `UserError`."""
    wanted = {
        split: split_pattern(config.source, str(getattr(config.splits, split)), split)
        for split in SPLITS
        if config.splits.is_named(split)
    } or {"": parse_pattern("data.source", config.source)}
    files: list[SourceFile] = []
    hidden: Counter[str] = Counter()
    for split, pattern in wanted.items():
        files += _match_files(pattern, split, hidden)
    files.sort(key=lambda file: (span_order(file.span), file.root, file.path, file.split))
    root = next(iter(wanted.values())).root
    _warn(config.source, files)
    return Listing(root, tuple(files), hidden)


def select_spans(listing: Listing, spans: str, seen: Mapping[str, str]) -> Listing:
    """Return the files that `data.spans` selects, and all files without a span.

    `seen` has the digests of the spans that the champion and its predecessors were trained on. Any
    other span counts as new, even an old span whose files arrived late or were rewritten.
    """
    there = list(listing.spans)
    if not there and spans != NEWEST:
        raise UserError(
            f"data.spans: {spans}, but no file of data.source has a span; write {SPAN} or "
            f"{DATE} into data.source, or leave data.spans out"
        )
    if not there or spans == ALL or (spans == SINCE_CHAMPION and not seen):
        return listing
    if spans == SINCE_CHAMPION:
        taken = [span for span, digest in listing.spans.items() if seen.get(span) != digest]
    else:
        taken = there[-1 if spans == NEWEST else -int(spans) :]
    kept = {"", *taken}
    return replace(listing, files=tuple(file for file in listing.files if file.span in kept))


def require_listed(file: Any, size: int, tag: str) -> None:
    """Raise `UserError` if the size or tag of a file has changed since it was listed."""
    if size != file.size:
        what = f"has {size} bytes, but had {file.size} when it was listed"
    elif file.tag and tag != file.tag:
        what = "has changed since it was listed"
    else:
        return
    raise UserError(
        f"data.source: {_format_location(file.uri)} {what}; run again without data.version when no "
        "process writes to it"
    )


def publish(listing: Listing, root: str) -> None:
    """Store a listing below `root`, in a folder named by its digest. Raises `UserError`."""
    with tempfile.TemporaryDirectory(prefix="listing-") as folder:
        Path(folder, _FILE).write_bytes(listing.to_json())
        uri = _place(root, listing.digest)
        fields = {"spans": dict(listing.spans), "roots": listing.roots}
        with suppress(storage.NotPublished):
            if storage.read_manifest(uri).fields == fields:
                return
            # The stored listing has the same files at another location, so replace it.
            storage.delete(uri)
        storage.publish(Path(folder), uri, kind=KIND, fields=fields)


def read_listing(root: str, digest: str) -> Listing:
    """Return the listing with the given digest below `root`. Raises `UserError` if none exists."""
    uri = _place(root, digest)
    try:
        return Listing.from_json(storage.read_file(uri, _FILE), where=uri)
    except storage.NotPublished:
        raise UserError(
            f"data.version: there is no listing {digest} below {root}; leave data.version empty to "
            "list the current files"
        ) from None


def list_spans(root: str, digest: str) -> dict[str, str]:
    """Return the digest of each span of a stored listing, or {} if the listing is not stored."""
    try:
        return dict(storage.read_manifest(_place(root, digest)).fields.get("spans", {}))
    except storage.NotPublished:
        return {}


def _place(root: str, digest: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", digest):
        raise UserError(f"data.version: {digest!r} is not the digest of a listing; leave it empty")
    return storage.join(root, "listings", digest)


def _match_files(pattern: Pattern, split: str, hidden: Counter[str]) -> list[SourceFile]:
    """Return the files that match a pattern or, if there are none, those below matching folders."""
    exact: list[SourceFile] = []
    below: list[SourceFile] = []
    others: list[str] = []
    spellings: dict[str, str] = {}
    count = 0
    for found in _list_files(pattern, hidden):
        count += 1
        if count % _PROGRESS == 0:
            _log.info("%s: %d files listed so far", pattern.key, count)
        matched = pattern.match(found.path)
        if matched is None:
            others = sorted([*others, found.path])[:3]
            continue
        if spellings.setdefault(matched.span, matched.written) != matched.written:
            raise UserError(
                f"{pattern.key}: {spellings[matched.span]!r} and {matched.written!r} (at "
                f"{found.path}) are the same span {matched.span}; write all spans the same way, "
                "and remove one of the two"
            )
        root, path = pattern.root, found.path
        if not path:
            root, path = storage.parent_of(root), storage.name_of(root)
        file = SourceFile(root, path, found.bytes, found.tag, matched.span, split)
        (below if matched.is_below else exact).append(file)
    if exact or below:
        return exact or below
    at = _format_location(pattern.root)
    if not count:
        raise UserError(f"{pattern.key}: there is no file at {at} (hidden files are ignored)")
    few = ", ".join(map(repr, others))
    raise UserError(
        f"{pattern.key}: no file matches {pattern.text!r}, but {count} other files are at {at}, "
        f"such as {few}; change the pattern, or put files there"
    )


def _list_files(pattern: Pattern, hidden: Counter[str]) -> Iterator[Any]:
    with report_errors(f"list {pattern.key} {pattern.text}"):
        try:
            for found in choose_store(pattern.root).files(pattern.root):
                if _is_hidden(found.path):
                    hidden[Path(found.path).suffix.lower()] += 1
                else:
                    yield found
        except FileNotFoundError as error:
            raise UserError(
                f"{pattern.key}: there is nothing at {_format_location(pattern.root)}"
            ) from error


def _is_hidden(path: str) -> bool:
    # Hide a path with an empty name, such as "a//b", because no file on a disk can have it.
    names = path.split("/") if path else []
    return any(not name or name[0] in "._" for name in names) or path.endswith(".crc")


def _format_location(uri: str) -> str:
    return str(storage.local_path(uri) or uri.partition("?")[0])


def _warn(source: str, files: list[SourceFile]) -> None:
    total = sum(file.size for file in files)
    if len(files) > _PROGRESS and total / len(files) < _SMALL:
        _log.warning(
            "data.source: %s has %d files of %d bytes on average; merge them into larger files, "
            "which are read much faster",
            source, len(files), total // len(files),
        )  # fmt: skip


def _digest(files: Iterable[SourceFile]) -> str:
    content = hashlib.sha256()
    for line in sorted(f"{f.path}\0{f.size}\0{f.tag}\0{f.split}\n" for f in files):
        content.update(os.fsencode(line))
    return content.hexdigest()[:32]
