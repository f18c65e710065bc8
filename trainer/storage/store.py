"""What a kind of storage has to offer so that directories can be published in it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trainer.storage.manifest import Checksum, Manifest


class Store(Protocol):
    """One scheme's storage, for one operation: all that it is asked shares one deadline.

    Every method raises `FileNotFoundError` where there is nothing at the URI, and another
    `OSError` where the storage fails. All methods may be called from several threads.
    """

    def read(self, uri: str) -> bytes:
        """Return the content of one file."""

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file: readers see the old content or the new."""

    def create(self, uri: str, data: bytes) -> bool:
        """Create one file, whole, and say whether there was none before; nothing is replaced."""

    def exists(self, uri: str) -> bool:
        """Say whether there is a file at a URI."""

    def checksum(self, uri: str) -> Checksum:
        """Return size and crc32c of one file as it is stored now."""

    def download(self, uri: str, target: Path) -> None:
        """Copy one file to a local path in a folder that exists."""

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Bring the files of `source` that `manifest` names to `uri`, the manifest last.

        Each file is verified at its destination. What a dead writer left there is replaced. Returns
        the manifest as it was written, which may say where the files stand, or None, with nothing
        changed that a reader sees, where a manifest stands at `uri` already.
        """

    def children(self, uri: str) -> list[str]:
        """Return the plain names directly below a URI, in order; hidden ones left out."""

    def remove(self, uri: str) -> None:
        """Remove a file, or a directory with all below it, the manifest first."""

    def discard(self, uri: str) -> None:
        """Remove one file, if it is there, without a look at what else is."""

    def sweep(self, uri: str) -> list[str]:
        """Remove what dead writers left at `uri` and below; return the URIs of what was removed."""
