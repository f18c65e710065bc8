"""Checkpoints that are differences, by their manifests: each needs the files of another one.

A difference has the rows of large variables that changed since a whole checkpoint of the run, its
base, which is next to it. The field `base` of its manifest says which one, and when that was
published: what another attempt has made in its place is not it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import storage
from trainer.errors import UserError
from trainer.json_records import from_tree
from trainer.storage import Manifest

FIELD = "base"
# Where the files of the base are fetched to, below those of the difference.
FOLDER = "base"
_ANYWHERE = "file:///"


@dataclass(frozen=True, kw_only=True)
class _Base:
    uri: str
    created: str


def uri_of(uri: str, fields: Mapping[str, Any]) -> str:
    """Return the URI of the base of the checkpoint at `uri`; empty where it is whole."""
    found = _base_of(fields)
    return storage.join(storage.parent_of(uri), storage.name_of(found.uri)) if found else ""


def _base_of(fields: Mapping[str, Any]) -> _Base | None:
    """Return what the field says; None without one, and where it is damaged.

    A damaged one must not hide others that are listed.
    """
    found = from_tree(_Base, fields.get(FIELD))
    if found is None:
        return None
    with suppress(UserError):
        # Both may have been moved together: only the name counts.
        storage.join(_ANYWHERE, storage.name_of(found.uri))
        return found
    return None


def manifest_of(uri: str, fields: Mapping[str, Any]) -> Manifest | None:
    """Return the manifest of the base of the checkpoint at `uri`; None where it is whole.

    Raises:
        Corrupt: the base is gone, or another checkpoint is in its place, or the field is damaged.
    """
    if FIELD not in fields:
        return None
    found = _base_of(fields)
    if found is None:
        raise storage.Corrupt(f"the manifest of {uri} has a damaged {FIELD!r}: take another one")
    base = uri_of(uri, fields)
    try:
        manifest = storage.read_manifest(base)
    except storage.NotPublished:
        manifest = None
    if manifest is None or manifest.created != found.created:
        what = "is not published any more" if manifest is None else "was replaced by another one"
        raise storage.Corrupt(
            f"{uri} holds only what changed since {base}, which {what}: take another checkpoint"
        )
    return manifest


def is_there(uri: str, created: str) -> bool:
    """Say whether the checkpoint that was published at `uri` then can still be a base."""
    try:
        return storage.read_manifest(uri).created == created
    except (storage.NotPublished, storage.Corrupt, storage.UnknownSchema):
        return False


def verify(uri: str) -> Manifest:
    """Verify the files of a checkpoint and of its base; see `storage.verify`."""
    manifest = storage.verify(uri)
    if manifest_of(uri, manifest.fields):
        storage.verify(uri_of(uri, manifest.fields))
    return manifest


def fetch(uri: str, folder: Path, *, only: Callable[[str], bool] | None = None) -> Manifest:
    """Fetch the files of a checkpoint, those of its base below `FOLDER`; see `storage.fetch`."""
    manifest = storage.read_manifest(uri)
    base = manifest_of(uri, manifest.fields)
    storage.fetch(uri, folder, only=only, manifest=manifest)
    if base:
        storage.fetch(uri_of(uri, manifest.fields), folder / FOLDER, only=only, manifest=base)
    return manifest
