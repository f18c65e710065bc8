"""Storage in the file system: a directory is published by one rename."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from trainer.errors import UserError
from trainer.storage.checksum import Checksum, checksum
from trainer.storage.manifest import MANIFEST, Manifest
from trainer.storage.staging import clear_below, locked, staging, sync
from trainer.storage.uri import local_path, uri_of


class FileStore:
    """Local disks and whatever is mounted like one."""

    def read(self, uri: str) -> bytes:
        """Return the content of one file."""
        return _path(uri).read_bytes()

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file by a rename."""
        path = _path(uri)
        with staging(path.parent, path.name) as stage:
            _write(stage / "content", data)
            os.replace(stage / "content", path)
            sync(path.parent)

    def create(self, uri: str, data: bytes) -> bool:
        """Create one file by a link, which never replaces another."""
        path = _path(uri)
        with staging(path.parent, path.name) as stage:
            _write(stage / "content", data)
            try:
                os.link(stage / "content", path)
            except FileExistsError:
                return False
            sync(path.parent)
        return True

    def exists(self, uri: str) -> bool:
        """Say whether there is a file."""
        return _path(uri).is_file()

    def checksum(self, uri: str) -> Checksum:
        """Return size and crc32c of one file as it is stored now."""
        return checksum(_path(uri))

    def download(self, uri: str, target: Path) -> None:
        """Copy one file to a local path in a folder that exists."""
        shutil.copyfile(_path(uri), target)

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Copy beside the destination, verify, write through to the disk, and rename."""
        target = _path(uri)
        with staging(target.parent, target.name) as stage:
            for entry in manifest.files:
                copy = stage / entry.path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / entry.path, copy)
                sync(copy)
                if checksum(copy) != entry.checksum:
                    raise UserError(
                        f"cannot publish {source} to {uri}: {entry.path} changed meanwhile, or was "
                        "copied wrongly; try again when nothing else writes there"
                    )
            _write(stage / MANIFEST, manifest.to_json())
            for folder, _, _ in os.walk(stage):
                sync(Path(folder))
            return manifest if _show(stage, target) else None

    def children(self, uri: str) -> list[str]:
        """Return the plain names directly below a URI, in order; hidden ones left out."""
        return sorted(name for name in os.listdir(_path(uri)) if not name.startswith("."))

    def remove(self, uri: str) -> None:
        """Take a file or directory out of sight by one rename, then remove it."""
        path = _path(uri)
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        _take_away(path)

    def discard(self, uri: str) -> None:
        """Remove one file."""
        with suppress(NotADirectoryError):
            _path(uri).unlink(missing_ok=True)

    def sweep(self, uri: str) -> list[str]:
        """Remove the hidden folders of dead writers."""
        if not _path(uri).is_dir():
            return []
        return [uri_of(path) for path in clear_below(_path(uri))]


def _path(uri: str) -> Path:
    path = local_path(uri)
    if path is None:
        raise ValueError(f"{uri} is not a file URI")
    return path


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _show(stage: Path, target: Path) -> bool:
    # The lock is for the directory without a manifest: between the look at it and its removal,
    # another writer could publish there.
    with locked(target.parent):
        try:
            os.rename(stage, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if (target / MANIFEST).exists():
                return False
            _refuse_parent(target)
            _rename_away(target)
            os.rename(stage, target)
        sync(target.parent)
    return True


def _refuse_parent(target: Path) -> None:
    # Only a dead writer's remains may be replaced. A parent of published directories is a mistake
    # in the URI, and replacing it would lose them all.
    inside = next(target.rglob(MANIFEST), None)
    if inside is not None:
        raise UserError(f"cannot publish at {target}: {inside.parent} is published below it")


def _take_away(path: Path) -> None:
    with locked(path.parent):
        _rename_away(path)


def _rename_away(path: Path) -> None:
    with staging(path.parent, path.name) as bin_:
        os.rename(path, bin_ / path.name)
