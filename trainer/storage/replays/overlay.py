"""The store of a replay: reads what was there at the time of the step, writes to the mirror alone.

A file is looked for in the mirror first, and then in the original store, which is only read. What
was published after the step began does not exist here, and what the replay removes is gone for the
replay alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn, TypeVar

from trainer.mirror import Replay, Snapshot
from trainer.storage.local import FileStore, NotAFileError
from trainer.storage.manifest import MANIFEST, Checksum, FileEntry, Manifest
from trainer.storage.store import ListedFile, Store
from trainer.storage.uri import join, locate, raw_path, uri_of

_ABSENT = (FileNotFoundError, NotADirectoryError)
_Found = TypeVar("_Found")


def over(uri: str, replay: Replay, store_of: Callable[[str], Store]) -> Store:
    """Return the store that serves `uri` in a replay; `store_of` returns the one elsewhere."""
    snapshot = replay.snapshot
    if _is_own(uri, replay):
        return store_of(uri)
    if below(uri, snapshot.root) is None:
        return ReadOnly(store_of(uri))
    return Overlay(store_of(snapshot.source), replay)


def below(uri: str, root: str) -> str | None:
    """Return the path of a URI below a root; empty for the root, None outside of it."""
    here, above = raw_path(uri), raw_path(root)
    if here is not None:
        inside = above is not None and here.is_relative_to(above)
        found = here.relative_to(above).as_posix() if above and inside else None
        return "" if found == "." else found
    if above is not None:
        return None
    there, home = locate(uri), locate(root)
    if there.home != home.home:
        return None
    if not home.key:
        return there.key
    is_inside = there.key == home.key or there.key.startswith(f"{home.key}/")
    return there.key[len(home.key) :].strip("/") if is_inside else None


def source_of(uri: str, snapshot: Snapshot) -> str:
    """Return the URI by which the original of a URI is read, and not its mirror."""
    path = below(uri, snapshot.root)
    if path is not None:
        uri = join(snapshot.source, path) if path else snapshot.source
    return uri.replace("file:///", "file://localhost/", 1)


def _is_own(uri: str, replay: Replay) -> bool:
    path = raw_path(uri)
    return path is not None and path.is_relative_to(replay.folder)


class ReadOnly:
    """What is outside of the root: a replay reads it where it is, and writes nothing there."""

    def __init__(self, original: Store) -> None:
        """Take the store that is read."""
        self._original = original

    def read(self, uri: str) -> bytes:
        """See `Store`."""
        return self._original.read(uri)

    def checksum(self, uri: str) -> Checksum:
        """See `Store`."""
        return self._original.checksum(uri)

    def download(self, uri: str, target: Path) -> None:
        """See `Store`."""
        self._original.download(uri, target)

    def children(self, uri: str) -> list[str]:
        """See `Store`."""
        return self._original.children(uri)

    def files(self, uri: str) -> Iterator[ListedFile]:
        """See `Store`."""
        return self._original.files(uri)

    def write(self, uri: str, data: bytes) -> None:  # noqa: ARG002
        """Refuse."""
        _refuse(uri)

    def create(self, uri: str, data: bytes) -> bool:  # noqa: ARG002
        """Refuse."""
        _refuse(uri)

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:  # noqa: ARG002
        """Refuse."""
        _refuse(uri)

    def draft(self, uri: str) -> AbstractContextManager[str]:
        """Refuse."""
        _refuse(uri)

    def add(self, draft: str, path: Path, name: str) -> FileEntry:  # noqa: ARG002
        """Refuse."""
        _refuse(draft)

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:  # noqa: ARG002
        """Refuse."""
        _refuse(uri)

    def remove(self, uri: str) -> None:
        """Refuse."""
        _refuse(uri)

    def discard(self, uri: str) -> None:
        """Refuse."""
        _refuse(uri)

    def sweep(self, uri: str) -> list[str]:
        """Refuse."""
        _refuse(uri)


class Overlay:
    """The storage root in a replay."""

    def __init__(self, original: Store, replay: Replay) -> None:
        """Take the store of the root, which is only read."""
        self._original, self._replay, self._mirror = original, replay, FileStore()

    def read(self, uri: str) -> bytes:
        """See `Store`; a manifest of a later time is not there."""
        return self._either(uri, self._mirror.read, self._original.read)

    def checksum(self, uri: str) -> Checksum:
        """See `Store`."""
        return self._either(uri, self._mirror.checksum, self._original.checksum)

    def download(self, uri: str, target: Path) -> None:
        """See `Store`."""
        self._either(
            uri,
            lambda at: self._mirror.download(at, target),
            lambda at: self._original.download(at, target),
        )

    def write(self, uri: str, data: bytes) -> None:
        """See `Store`."""
        self._mirror.write(self._place(uri), data)

    def create(self, uri: str, data: bytes) -> bool:
        """See `Store`."""
        if self._is_there(uri):
            return False
        return self._mirror.create(self._place(uri), data)

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """See `Store`."""
        if self._is_there(f"{uri.partition('?')[0].rstrip('/')}/{MANIFEST}"):
            return None
        return self._mirror.place(self._place(uri), source, manifest)

    def draft(self, uri: str) -> AbstractContextManager[str]:
        """See `Store`."""
        return self._mirror.draft(self._place(uri))

    def add(self, draft: str, path: Path, name: str) -> FileEntry:
        """See `Store`."""
        return self._mirror.add(draft, path, name)

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:
        """See `Store`."""
        return self._mirror.commit(draft, self._place(uri), manifest)

    def children(self, uri: str) -> list[str]:
        """See `Store`; a directory of a later time has its name here, and no manifest."""
        found: set[str] = set()
        missing: OSError | None = None
        for names in (self._own_names, self._names):
            try:
                found.update(names(uri))
            except _ABSENT as error:
                missing = error
        if not found and missing and not self._is_folder(uri):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
        return sorted(found)

    def files(self, uri: str) -> Iterator[ListedFile]:
        """See `Store`."""
        seen = set()
        if self._is_folder(uri):
            for each in self._mirror.files(self._place(uri)):
                seen.add(each.path)
                yield each
        if self._is_hidden(uri):
            return
        for each in self._original.files(self._from(uri)):
            if each.path not in seen:
                yield each

    def remove(self, uri: str) -> None:
        """Remove it from the mirror, and hide the original; see `Store`."""
        was_there = self._is_folder(uri) or self._is_there(uri) or bool(self._original_names(uri))
        try:
            self._mirror.remove(self._place(uri))
        except _ABSENT:
            if not was_there:
                raise
        self._hide(uri)

    def discard(self, uri: str) -> None:
        """See `Store`."""
        self._mirror.discard(self._place(uri))
        self._hide(uri)

    def sweep(self, uri: str) -> list[str]:
        """See `Store`; only the mirror has anything to sweep."""
        return self._mirror.sweep(self._place(uri)) if self._is_folder(uri) else []

    def _either(
        self, uri: str, own: Callable[[str], _Found], other: Callable[[str], _Found]
    ) -> _Found:
        try:
            return own(self._place(uri))
        except _ABSENT:
            if self._is_hidden(uri):
                raise
        if self._is_manifest(uri) and self._is_later(self._original.read(self._from(uri))):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
        return other(self._from(uri))

    def _is_there(self, uri: str) -> bool:
        try:
            self.read(uri)
        except (*_ABSENT, NotAFileError):
            return False
        return True

    def _own_names(self, uri: str) -> list[str]:
        return self._mirror.children(self._place(uri))

    def _names(self, uri: str) -> list[str]:
        if self._is_hidden(uri):
            return []
        path = self._path(uri)
        found = self._original.children(self._from(uri))
        return [name for name in found if not self._is_hidden_path(f"{path}/{name}".strip("/"))]

    def _original_names(self, uri: str) -> list[str]:
        try:
            return self._names(uri)
        except _ABSENT:
            return []

    def _is_folder(self, uri: str) -> bool:
        return (self._replay.mirror / self._path(uri)).is_dir()

    def _path(self, uri: str) -> str:
        return below(uri, self._replay.snapshot.root) or ""

    def _from(self, uri: str) -> str:
        return source_of(uri, self._replay.snapshot)

    def _place(self, uri: str) -> str:
        return uri_of(self._replay.mirror / self._path(uri))

    def _is_manifest(self, uri: str) -> bool:
        return uri.partition("?")[0].endswith(f"/{MANIFEST}")

    def _is_later(self, data: bytes) -> bool:
        try:
            created = json.loads(data)["created"]
        except (ValueError, TypeError, KeyError):
            # Damaged: the step has seen that as well.
            return False
        return isinstance(created, str) and created > self._replay.snapshot.until

    def _is_hidden(self, uri: str) -> bool:
        return self._is_hidden_path(self._path(uri))

    def _is_hidden_path(self, path: str) -> bool:
        if any(fnmatchcase(path, pattern) for pattern in self._replay.snapshot.hidden):
            return True
        if not self._gone.is_dir():
            return False
        names = path.split("/")
        above = ("/".join(names[:count]) for count in range(1, len(names) + 1))
        return any((self._gone / _mark(each)).exists() for each in above)

    def _hide(self, uri: str) -> None:
        # A file that all processes of the replay see.
        self._gone.mkdir(parents=True, exist_ok=True)
        (self._gone / _mark(self._path(uri))).touch()

    @property
    def _gone(self) -> Path:
        return self._replay.folder / "gone"


def _mark(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def _refuse(uri: str) -> NoReturn:
    raise OSError(errno.EROFS, "a replay publishes nothing", uri.partition("?")[0])
