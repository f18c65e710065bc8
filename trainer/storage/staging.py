"""Hidden folders in which something is made before one rename shows it.

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
from pathlib import Path

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
