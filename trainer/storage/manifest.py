"""`MANIFEST.json`, which lists the files of a published directory.

`{"schema": 1, "kind": ..., "created": ..., "files": [{"path", "bytes", "crc32c"}], ...fields}`

Paths are relative, with forward slashes. A file may also have `"at"`, the path where it is stored
if its own path was already taken.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google_crc32c

from flotilla.trainer.runtime.json_records import parse, parse_time
from flotilla.trainer.storage.errors import Corrupt, UnknownSchema

MANIFEST = "MANIFEST.json"
SCHEMA = 1
RESERVED = ("schema", "kind", "created", "files")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Checksum:
    """A size in bytes, and a crc32c as eight hexadecimal digits."""

    bytes: int
    crc32c: str


def checksum(path: Path) -> Checksum:
    """Return the size and crc32c of a local file. Raises `OSError` if it is not readable."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "not a file", str(path))
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = google_crc32c.extend(crc, chunk)
    return Checksum(size, f"{crc:08x}")


def compute_checksum(data: bytes) -> Checksum:
    """Return the size and crc32c of bytes in memory."""
    return Checksum(len(data), f"{google_crc32c.value(data):08x}")


@dataclass(frozen=True)
class FileEntry:
    """One file of a published directory. An invalid value raises `ValueError`."""

    path: str
    bytes: int
    crc32c: str
    at: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Reject values that a manifest must not contain."""
        for path in (self.path, self.stored_at):
            if not _is_inside(path):
                raise ValueError(f"{path!r} is not a path below the directory")
        if type(self.bytes) is not int or self.bytes < 0:
            raise ValueError(f"{self.path}: {self.bytes!r} is not a size")
        if not isinstance(self.crc32c, str) or not re.fullmatch(r"[0-9a-f]{8}", self.crc32c):
            raise ValueError(f"{self.path}: {self.crc32c!r} is not a crc32c")

    @property
    def checksum(self) -> Checksum:
        """The expected size and crc32c of the file."""
        return Checksum(self.bytes, self.crc32c)

    @property
    def stored_at(self) -> str:
        """The path where the file is stored, relative to the directory."""
        return self.at or self.path

    def to_tree(self) -> dict[str, Any]:
        """Return the entry of the file in the manifest, as a JSON object."""
        tree = {"path": self.path, "bytes": self.bytes, "crc32c": self.crc32c}
        return {**tree, "at": self.at} if self.at else tree


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Manifest:
    """The files and fields of a published directory. An invalid value raises `ValueError`."""

    kind: str
    files: tuple[FileEntry, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=_now)

    def __post_init__(self) -> None:
        """Sort the files, convert the fields to plain JSON, and reject invalid values."""
        for name in ("kind", "created"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name}: {value!r} is empty or not a string")
        if taken := [name for name in self.fields if name in RESERVED]:
            raise ValueError(f"the manifest reserves these field names: {', '.join(taken)}")
        ordered = tuple(sorted(self.files, key=lambda entry: entry.path))
        if len({entry.path for entry in ordered}) < len(ordered):
            raise ValueError("a file is listed twice")
        object.__setattr__(self, "files", ordered)
        # Convert tuples to lists, so that a manifest still equals itself after a write and a read.
        object.__setattr__(self, "fields", json.loads(json.dumps(self.fields, allow_nan=False)))

    @property
    def created_at(self) -> datetime:
        """The time of creation, or the latest possible time if the recorded time is invalid."""
        return parse_time(self.created) or datetime.max.replace(tzinfo=UTC)

    @property
    def total_bytes(self) -> int:
        """The total size of all files, in bytes."""
        return sum(entry.bytes for entry in self.files)

    def same_content(self, other: Manifest) -> bool:
        """Return whether both manifests have the same content, whatever their creation times."""
        return self == replace(other, created=self.created)

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the content, regardless of the time of publication."""
        files = [(entry.path, entry.bytes, entry.crc32c) for entry in self.files]
        text = json.dumps([self.kind, files, self.fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> bytes:
        """Return the text of `MANIFEST.json`."""
        files = [entry.to_tree() for entry in self.files]
        head = {"schema": SCHEMA, "kind": self.kind, "created": self.created, "files": files}
        text = json.dumps({**head, **self.fields}, indent=1, ensure_ascii=False, allow_nan=False)
        return (text + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes | str, where: str = MANIFEST) -> Manifest:
        """Parse the text of a manifest. Raises `UnknownSchema` or `Corrupt`, which name `where`."""
        try:
            tree = parse(data)
            if not isinstance(tree, dict):
                raise ValueError("not an object")
            # Check the schema first, because the keys of another schema may differ.
            _refuse_other_schema(tree.get("schema"), where)
            missing = [name for name in RESERVED if name not in tree]
            if missing:
                raise ValueError(f"missing keys: {', '.join(missing)}")
            files = tuple(FileEntry(**entry) for entry in tree["files"])
            fields = {name: value for name, value in tree.items() if name not in RESERVED}
            if parse_time(tree["created"]) is None:
                raise ValueError(f"{tree['created']!r:.99} is not a time")
            return cls(tree["kind"], files, fields, tree["created"])
        except (ValueError, TypeError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise Corrupt(
                f"{where} is damaged ({reason}): delete it and create it again"
            ) from error


def _refuse_other_schema(schema: object, where: str) -> None:
    if type(schema) is not int:
        raise ValueError(f"{schema!r} is not a schema number")
    if schema != SCHEMA:
        raise UnknownSchema(
            f"{where} has schema {schema}, but this version reads only schema {SCHEMA}; use the "
            "version that wrote it, or create it again"
        )


def _is_inside(path: object) -> bool:
    if not isinstance(path, str) or "\0" in path or path == MANIFEST:
        return False
    return not any(name in ("", ".", "..") for name in path.split("/"))
