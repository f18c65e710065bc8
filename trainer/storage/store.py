"""The interface of a store: what a scheme needs so that directories can be published in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.storage.manifest import Checksum, FileEntry, Manifest


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file as a listing shows it, without being read.

    Attributes:
        path: below the URI that was listed; empty where that is the file itself.
        tag: what differs when the content does: a checksum of the store, or the time of a change.
    """

    path: str
    bytes: int
    tag: str


class Store(Protocol):
    """The storage of one scheme, for one operation, whose requests share one deadline.

    Every method raises `FileNotFoundError` where there is nothing at the URI, and another `OSError`
    where the storage fails. All methods are thread-safe.
    """

    def read(self, uri: str) -> bytes:
        """Return the content of one file."""

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file, atomically."""

    def create(self, uri: str, data: bytes) -> bool:
        """Create one file atomically if there is none; return whether it was created."""

    def checksum(self, uri: str) -> Checksum:
        """Return size and crc32c of one file as it is stored now."""

    def download(self, uri: str, target: Path) -> None:
        """Copy one file to a local path in a folder that exists."""

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Copy the files of `source` that `manifest` names to `uri`, verified, the manifest last.

        Returns the manifest as it was written, with the paths at which the files are stored, or
        None where there is one at `uri` already; then nothing changes that a reader sees.
        """

    def draft(self, uri: str) -> AbstractContextManager[str]:
        """Return where files are added to what is published at a URI later; see `drafts`."""

    def add(self, draft: str, path: Path, name: str) -> FileEntry:
        """Move a local file into a draft, verified at its destination; any process may."""

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:
        """Publish at `uri` what was added to its draft and `manifest` names; see `place`."""

    def children(self, uri: str) -> list[str]:
        """Return the plain names directly below a URI, in order; hidden ones left out."""

    def files(self, uri: str) -> Iterator[ListedFile]:
        """Yield the files at a URI and below, while they are listed; in any order."""

    def remove(self, uri: str) -> None:
        """Remove a file, or a directory with all below it, the manifest first."""

    def discard(self, uri: str) -> None:
        """Remove one file, if it exists, without listing anything."""

    def sweep(self, uri: str) -> list[str]:
        """Remove the orphans of dead writers at `uri` and below; return their URIs."""
