"""What a kind of storage has to offer so that directories can be published in it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trainer.storage.checksum import Checksum
from trainer.storage.manifest import Manifest


class Store(Protocol):
    """One scheme's storage.

    Every method raises `FileNotFoundError` where there is nothing at the URI, and another
    `OSError` where the storage fails.
    """

    def read(self, uri: str) -> bytes:
        """Return the content of one file."""

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file: readers see the old content or the new."""

    def checksum(self, uri: str) -> Checksum:
        """Return size and crc32c of one file as it is stored now."""

    def download(self, uri: str, target: Path) -> None:
        """Copy one file to a local path in a folder that exists."""

    def place(self, uri: str, source: Path, manifest: Manifest) -> bool:
        """Bring the files of `source` that `manifest` names to `uri`, the manifest last.

        Each file is verified at its destination. Files without a manifest that stand there are
        replaced. Returns False, with nothing changed, where a manifest stands at `uri` already.
        """

    def children(self, uri: str) -> list[str]:
        """Return the plain names directly below a URI, in order; hidden ones left out."""

    def remove(self, uri: str) -> None:
        """Remove a file, or a directory with all below it, the manifest first."""
