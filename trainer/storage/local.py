"""Storage in the file system: a directory is published by one rename.

Who writes: what a dead process left is told from what a living one is about to finish.

Hidden folders in which something is made before one rename shows it.

A folder is locked while its maker lives, so that the next one can tell a dead maker's folder from
one in use, and clear it away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from trainer.errors import UserError
from trainer.storage.manifest import MANIFEST, Checksum, Manifest, checksum
from trainer.storage.uri import local_path, uri_of


def writer() -> str:
    """Return a text that no other process has, on any machine, in any container."""
    return f"{_machine()}/{os.getpid()}/{_begun(os.getpid())}"


def is_gone(text: str) -> bool:
    """Say whether the process of a `writer` is known to have ended.

    Nothing is known of the processes of another machine.
    """
    number, begun = _here(text)
    return bool(number) and _begun(int(number)) != begun


def is_living(text: str) -> bool:
    """Say whether the process of a `writer` is known to live, likewise."""
    number, begun = _here(text)
    return bool(number) and _begun(int(number)) == begun


def _here(text: str) -> tuple[str, str]:
    """Return the number and the beginning of a process of this machine, nothing of another."""
    machine, _, process = text.partition("/")
    number, _, begun = process.partition("/")
    return (number, begun) if machine == _machine() and number.isdigit() else ("", "")


@cache
def _machine() -> str:
    # Two containers of one machine have processes of the same number.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def _begun(process: int) -> str:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # After the name, which may hold anything: state is the first field, the start the 20th.
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]


_NAME = re.compile(r"\..+\.[0-9a-f]{12}\.part", re.DOTALL)


@contextmanager
def staging(parent: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder in `parent`, named after `name`; what is left of it at the end goes."""
    parent.mkdir(parents=True, exist_ok=True)
    _clear_dead(parent)
    with _until_done(*_claim(parent, name)) as stage:
        yield stage


@contextmanager
def taken_up(parent: Path, name: str) -> Iterator[Path]:
    """Do as `staging`, but go on in the folder that a dead maker of the same name left."""
    parent.mkdir(parents=True, exist_ok=True)
    claimed = _inherited(parent, name)
    # After that, so that the one that was inherited is not among the dead.
    _clear_dead(parent)
    with _until_done(*(claimed or _claim(parent, name))) as stage:
        yield stage


@contextmanager
def _until_done(stage: Path, descriptor: int) -> Iterator[Path]:
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        _unlock(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other writers that lock the same directory out."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    _lock(descriptor, wait=True)
    try:
        yield
    finally:
        _unlock(descriptor)


def clear_below(root: Path) -> list[Path]:
    """Remove what dead makers left in `root` and below; return what was removed."""
    found = []
    for folder, folders, _ in os.walk(root):
        stages = [Path(folder) / name for name in folders if is_staging(name)]
        folders[:] = [name for name in folders if not is_staging(name)]
        for stage in stages:
            with suppress(OSError):
                _clear_if_dead(stage)
        found += [stage for stage in stages if not stage.exists()]
    return found


def is_staging(name: str) -> bool:
    """Say whether a folder of this name is one of ours."""
    return _NAME.fullmatch(name) is not None


def sync(path: Path) -> None:
    """Have a file or folder written through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _claim(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        stage = parent / f".{name}.{uuid.uuid4().hex[:12]}.part"
        stage.mkdir()
        # Between mkdir and lock the folder looks like a dead maker's; who finds it gone tries anew.
        with suppress(FileNotFoundError):
            descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
            _lock(descriptor, wait=True)
            if stage.exists():
                return stage, descriptor
            _unlock(descriptor)


def _inherited(parent: Path, name: str) -> tuple[Path, int] | None:
    for other in sorted(os.listdir(parent)):
        if is_staging(other) and other[1:].rpartition(".part")[0][:-13] == name:
            stage = parent / other
            with suppress(OSError):
                descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                if _lock(descriptor, wait=False) and stage.exists():
                    return stage, descriptor
                _unlock(descriptor)
    return None


def _clear_dead(parent: Path) -> None:
    for name in os.listdir(parent):
        if is_staging(name):
            with suppress(OSError):
                _clear_if_dead(parent / name)


def _clear_if_dead(stage: Path) -> None:
    descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if _lock(descriptor, wait=False):
            shutil.rmtree(stage, ignore_errors=True)
    finally:
        _unlock(descriptor)


def _lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        # Some network file systems cannot lock a folder. A rename is still all or nothing there;
        # only the tidying up, and the replacing of what is half-made, are then less guarded.
        if error.errno in (errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOTSUP, errno.EAGAIN):
            return False
        raise
    return True


def _unlock(descriptor: int) -> None:
    # Closing alone would leave the lock with a child that was forked meanwhile.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


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
