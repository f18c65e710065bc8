"""Storage in the file system, where an atomic rename publishes a directory.

A writer first writes the files to a staging folder, which it locks while it runs. The next writer
deletes the staging folders of dead writers. Object stores have no locks. Instead, they record the
identifier that `writer` returns.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import pwd
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse_number
from flotilla.trainer.storage.manifest import MANIFEST, Checksum, FileEntry, Manifest, checksum
from flotilla.trainer.storage.store import (
    Count,
    ListedFile,
    TooLargeError,
    count_nothing,
    wait_until,
)
from flotilla.trainer.storage.uri import local_path, uri_of

# Maximum time to wait for a lock, and the interval between two attempts, in seconds.
LOCK_SECONDS, LOCK_POLL = 15.0, 0.02
_log = logging.getLogger(__name__)
_STAGING_NAME = re.compile(r"\..+\.[0-9a-f]{12}\.part", re.DOTALL)


class NotAFileError(OSError):
    """There is a folder, a pipe or a dangling link where a file is expected."""

    def __init__(self, number: int, path: str) -> None:
        """Build the message for the path."""
        words = os.strerror(number) if number == errno.EISDIR else "not a file"
        super().__init__(number, words, path)


@dataclass
class FileStore:
    """Local disks and mounted file systems. `count` is called with the number of bytes copied."""

    count: Count = count_nothing

    def read(self, uri: str) -> bytes:
        """Return the content of one file. Raises `NotAFileError` for a folder, pipe or device."""
        path = _path(uri)
        try:
            mode = path.stat().st_mode
        except OSError:
            if path.is_symlink():
                raise NotAFileError(errno.EINVAL, str(path)) from None
            raise
        # Reject a pipe, because opening it would block until a writer opens it too.
        if not stat.S_ISREG(mode):
            raise NotAFileError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, str(path))
        return path.read_bytes()

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file by an atomic rename."""
        path = _path(uri)
        with staging(path.parent, path.name) as stage:
            _write(stage / "content", data)
            os.replace(stage / "content", path)
            sync(path.parent)

    def create(self, uri: str, data: bytes) -> bool:
        """Create one file by an atomic link, which never replaces an existing file."""
        path = _path(uri)
        with staging(path.parent, path.name) as stage:
            _write(stage / "content", data)
            try:
                os.link(stage / "content", path)
            except FileExistsError:
                return False
            sync(path.parent)
        return True

    def checksum(self, uri: str) -> Checksum:
        """Return the size and crc32c of one file as stored."""
        return checksum(_path(uri))

    def download(self, uri: str, target: Path) -> str:
        """Copy one file to a local path in an existing folder, and return its tag."""
        path = _path(uri)
        before = path.stat()
        shutil.copyfile(path, target)
        self.count(target.stat().st_size)
        return tag_of(before, path.stat())

    def read_tagged(self, uri: str, most: int) -> tuple[bytes, str]:
        """Return the content and tag of one file. Raises `TooLargeError` beyond `most` bytes."""
        path = _path(uri)
        before = path.stat()
        if before.st_size > most:
            raise TooLargeError(most)
        data = self.read(uri)
        return data, tag_of(before, path.stat())

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Copy, verify and flush the files in a staging folder, and rename the folder to `uri`.

        Returns None, and changes nothing, if `uri` already has a manifest.
        """
        target = _path(uri)
        with staging(target.parent, target.name) as stage:
            for entry in manifest.files:
                copy = stage / entry.path
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / entry.path, copy)
                sync(copy)
                if checksum(copy) != entry.checksum:
                    raise UserError(
                        f"cannot publish {source} to {uri}: {entry.path} changed during the copy, "
                        "or the copy is damaged; try again when nothing else writes there"
                    )
                self.count(entry.bytes)
            return _publish_stage(stage, target, manifest)

    @contextmanager
    def draft(self, uri: str) -> Iterator[str]:
        """Yield a staging folder next to the destination."""
        target = _path(uri)
        with staging(target.parent, target.name) as stage:
            yield uri_of(stage)

    def add(self, draft: str, path: Path, name: str) -> FileEntry:
        """Move the file into the draft, even across file systems, and flush it to disk."""
        target = _path(draft) / name
        try:
            os.rename(path, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            shutil.copyfile(path, target)
            path.unlink()
        sync(target)
        found = checksum(target)
        return FileEntry(name, found.bytes, found.crc32c)

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:
        """Rename the draft, which must contain only the files in `manifest`."""
        for entry in manifest.files:
            if (_path(draft) / entry.path).stat().st_size != entry.bytes:
                raise UserError(
                    f"cannot publish {uri}: {entry.path} changed after it was added; try again "
                    "when nothing else writes there"
                )
        return _publish_stage(_path(draft), _path(uri), manifest)

    def children(self, uri: str) -> list[str]:
        """Return the decoded names directly below a URI, sorted, without hidden ones."""
        return sorted(name for name in os.listdir(_path(uri)) if not name.startswith("."))

    def files(self, uri: str) -> Iterator[ListedFile]:
        """Yield the files below a folder, following links, or the single file at the path."""
        path = _path(uri)
        if not path.is_dir():
            yield _list_file("", path.stat())
            return
        yield from _walk(path, "", frozenset())

    def remove(self, uri: str) -> None:
        """Move a file or directory to a staging folder in one step, then delete it."""
        path = _path(uri)
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        # Unlock the parent before the deletion, because a deletion can exceed `LOCK_SECONDS`.
        with staging(path.parent, path.name) as bin_, locked(path.parent):
            os.rename(path, bin_ / path.name)

    def discard(self, uri: str) -> None:
        """Remove one file."""
        with suppress(NotADirectoryError):
            _path(uri).unlink(missing_ok=True)

    def sweep(self, uri: str) -> list[str]:
        """Delete the staging folders of dead writers."""
        return [uri_of(path) for path in delete_orphans(_path(uri))]

    def read_clock(self, uri: str) -> float:
        """Set the folder's modification time to the file system's current time, and return it."""
        # Unlike creating a file, this works on a full disk.
        os.utime(_path(uri))
        return _path(uri).stat().st_mtime


def append_line(path: Path, line: bytes) -> None:
    """Append a line and flush it to disk, completely or not at all. `line` ends with a newline.

    The file must have only one writer. If a killed writer left a truncated last line, that line is
    terminated first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # With O_NONBLOCK, opening a pipe never blocks.
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NotAFileError(errno.EINVAL, str(path))
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" + line if is_cut else line
        try:
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def tag_of(before: os.stat_result, after: os.stat_result | None = None) -> str:
    """Return the tag of a file. If `after` shows a change, the tag matches no listing."""
    # Include the ctime, because it cannot be set back, unlike the mtime.
    names = ("st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
    if after and any(getattr(before, name) != getattr(after, name) for name in names):
        return "changed while it was read"
    return str(before.st_mtime_ns)


def _path(uri: str) -> Path:
    path = local_path(uri)
    if path is None:
        raise ValueError(f"{uri} is not a file URI")
    return path


def _list_file(path: str, found: os.stat_result) -> ListedFile:
    return ListedFile(path, found.st_size, tag_of(found))


def _walk(folder: Path, above: str, seen: frozenset[tuple[int, int]]) -> Iterator[ListedFile]:
    here = folder.stat()
    # Stop here, because following a link to a parent folder would never end.
    if (here.st_dev, here.st_ino) in seen:
        return
    below = seen | {(here.st_dev, here.st_ino)}
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{above}{entry.name}"
            # Skip an entry that was removed after the folder was read.
            with suppress(FileNotFoundError):
                if entry.is_dir():
                    yield from _walk(folder / entry.name, f"{path}/", below)
                elif entry.is_file():
                    yield _list_file(path, entry.stat())


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    sync(path)


def _publish_stage(stage: Path, target: Path, manifest: Manifest) -> Manifest | None:
    _write(stage / MANIFEST, manifest.to_json())
    for folder, _, _ in os.walk(stage):
        sync(Path(folder))
    return manifest if _commit(stage, target) else None


def _commit(stage: Path, target: Path) -> bool:
    if not _rename_stage(stage, target):
        if (target / MANIFEST).exists():
            return False
        # Without the lock, another writer could publish at the target between the check for a
        # manifest and the removal.
        with staging(target.parent, target.name) as bin_, locked(target.parent):
            for number in itertools.count():
                if _rename_stage(stage, target):
                    break
                if (target / MANIFEST).exists():
                    return False
                # Replace only an unpublished directory. If it contains published directories, the
                # URI is probably wrong, and replacing it would delete them all.
                if inside := next(target.rglob(MANIFEST), None):
                    raise UserError(
                        f"cannot publish to {target}: {inside.parent}, which is below it, is "
                        "already published; use another location"
                    )
                os.rename(target, bin_ / str(number))
    sync(target.parent)
    return True


def _rename_stage(stage: Path, target: Path) -> bool:
    try:
        os.rename(stage, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


@contextmanager
def staging(parent: Path, name: str, *, resume: bool = False) -> Iterator[Path]:
    """Yield a staging folder for `name`, and delete it at the end.

    With `resume`, use the folder that a dead writer of `name` has left, if there is one.
    """
    parent.mkdir(parents=True, exist_ok=True)
    inherited = _inherit(parent, name) if resume else None
    # Delete orphans only after `_inherit`, whose lock keeps the inherited folder.
    for other in filter(is_staging, os.listdir(parent)):
        with suppress(OSError):
            _delete_if_orphan(parent / other)
    stage, descriptor = inherited or _claim(parent, name)
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        _unlock(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Exclude other writers that lock the same directory. Raises `UserError` on a timeout.

    Any process that can read a directory can lock it, even a process of another user.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:

        def describe_lock() -> str:
            return f"the lock of {directory}, which {_lock_holder(descriptor)} holds"

        if not wait_until(
            lambda: _lock(descriptor) is not False, describe_lock, LOCK_SECONDS, LOCK_POLL
        ):
            raise UserError(
                f"waited {LOCK_SECONDS:g} s for {describe_lock()}: stop that process, or deny "
                "other users access to the folder; then try again"
            )
        yield
    finally:
        _unlock(descriptor)


def delete_orphans(root: Path) -> list[Path]:
    """Delete the staging folders of dead writers in and below `root`, and return their paths."""
    found = []
    for folder, folders, _ in os.walk(root):
        stages = [Path(folder) / name for name in folders if is_staging(name)]
        folders[:] = [name for name in folders if not is_staging(name)]
        for stage in stages:
            with suppress(OSError):
                if _delete_if_orphan(stage) and stage.exists():
                    _log.warning("cannot delete %s; make it accessible to this user", stage)
        found += [stage for stage in stages if not stage.exists()]
    return found


def is_staging(name: str) -> bool:
    """Return whether `name` is the name of a staging folder."""
    return _STAGING_NAME.fullmatch(name) is not None


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _claim(parent: Path, name: str) -> tuple[Path, int]:
    while True:
        stage = parent / f".{name}.{uuid.uuid4().hex[:12]}.part"
        stage.mkdir()
        # Until this process locks it, the new folder looks like an orphan. Another writer may
        # therefore lock and delete it.
        with suppress(FileNotFoundError):
            descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY)
            if _lock(descriptor) is not False and stage.exists():
                return stage, descriptor
            _unlock(descriptor)
            # Remove the folder here, because the process that holds the lock may lack the
            # permission to do so.
            with suppress(OSError):
                stage.rmdir()


def _inherit(parent: Path, name: str) -> tuple[Path, int] | None:
    for other in sorted(filter(is_staging, os.listdir(parent))):
        if other[1:].rpartition(".part")[0][:-13] == name:
            stage = parent / other
            with suppress(OSError):
                descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                if _lock(descriptor) and stage.exists():
                    return stage, descriptor
                _unlock(descriptor)
    return None


def _delete_if_orphan(stage: Path) -> bool:
    descriptor = os.open(stage, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        is_orphan = _lock(descriptor) is True
        if is_orphan:
            shutil.rmtree(stage, ignore_errors=True)
    finally:
        _unlock(descriptor)
    return is_orphan


def _lock(descriptor: int) -> bool | None:
    """Lock a folder. Return False if another process holds the lock, None if unsupported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems cannot lock a folder. A rename is still atomic. Only the
        # deletion of orphans and the replacement of an unpublished directory are less safe.
        if error.errno in (errno.ENOLCK, errno.EBADF, errno.EINVAL, errno.ENOTSUP):
            return None
        raise
    return True


def _lock_holder(descriptor: int) -> str:
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError, KeyError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5] == place:
                owner = pwd.getpwuid(os.stat(f"/proc/{fields[4]}").st_uid).pw_name
                return f"process {fields[4]} of the user {owner}"
    return "another process"


def _unlock(descriptor: int) -> None:
    # Unlock explicitly, because a forked child would keep the lock if the descriptor were only
    # closed.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def writer() -> str:
    """Return a globally unique identifier of this process, or "" on a system without `/proc`."""
    return f"{_machine()}/{os.getpid()}/{start_time(os.getpid())}" if _machine() else ""


def is_gone(text: str) -> bool:
    """Return whether the process that `text` identifies ran on this machine and has ended."""
    number, started = _here(text)
    return bool(number) and start_time(number) != started


def is_living(text: str) -> bool:
    """Return whether the process that `text` identifies is running on this machine."""
    number, started = _here(text)
    return bool(number) and start_time(number) == started


def _here(text: str) -> tuple[int, str]:
    """Parse the PID and start time in a result of `writer`. The PID is 0 for another machine."""
    machine, _, process = text.partition("/")
    number, _, started = process.partition("/")
    is_here = machine and machine == _machine()
    return (parse_number(number) or 0, started) if is_here else (0, "")


@cache
def _machine() -> str:
    # Add the PID namespace, because two containers on one machine may use the same PID.
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def start_time(process: int) -> str:
    """Return the start time of a process in clock ticks, or "" if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # Skip the process name, which may contain any character. After it, the first field is the state
    # and the 20th is the start time.
    state, *fields = text.rpartition(")")[2].split()
    return "" if state == "Z" else fields[18]
