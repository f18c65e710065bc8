"""Fetch a published directory, or some of its files, into a local folder."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.storage.checksum import checksum
from trainer.storage.errors import reported
from trainer.storage.manifest import FileEntry, Manifest
from trainer.storage.parallel import in_parallel
from trainer.storage.publishing import read_manifest, refuse_difference
from trainer.storage.schemes import store_for
from trainer.storage.staging import taken_up
from trainer.storage.store import Store
from trainer.storage.uri import join

_log = logging.getLogger(__name__)


def fetch(uri: str, directory: Path, *, only: Callable[[str], bool] | None = None) -> Manifest:
    """Copy the published files at `uri` into `directory`, verified.

    Nothing shows in `directory` before all files are there and right; a directory that did not
    exist appears as a whole. Files that are there and right already are kept, also those that one
    which died has brought so far, and other files in it are left alone.

    Args:
        uri: a published directory.
        directory: local folder; made where it is missing.
        only: picks files by their path in the manifest; all when left out.

    Returns:
        The whole manifest, whatever `only` picked.

    Raises:
        NotPublished: there is no manifest at `uri`.
        Corrupt: a file is missing or differs from the manifest.
        UserError: `directory` cannot be written.
    """
    manifest = read_manifest(uri)
    directory = Path(os.path.abspath(directory))
    wanted = [entry for entry in manifest.files if only is None or only(entry.path)]
    with reported(f"fetch {uri} into {directory}"):
        lacking = [entry for entry in wanted if not _is_there(directory, entry)]
        if lacking or not directory.is_dir():
            _bring(uri, lacking, directory)
    return manifest


def _is_there(directory: Path, entry: FileEntry) -> bool:
    path = directory / entry.path
    return path.is_file() and checksum(path) == entry.checksum


def _bring(uri: str, entries: Sequence[FileEntry], directory: Path) -> None:
    # Inside a folder that exists: it may be a mount, and a rename cannot leave its file system.
    home = directory if directory.is_dir() else directory.parent
    store = store_for(uri)
    with taken_up(home, directory.name) as stage:
        in_parallel(lambda entry: _download(store, uri, entry, stage), entries)
        _leave_only(entries, stage)
        try:
            if home != directory:
                os.rename(stage, directory)
                return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        for entry in entries:
            (directory / entry.path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(stage / entry.path, directory / entry.path)


def _download(store: Store, uri: str, entry: FileEntry, stage: Path) -> None:
    target = stage / entry.path
    if _is_there(stage, entry):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.download(join(uri, entry.stored_at), target)
        if checksum(target) != entry.checksum:
            # It may have gone wrong on the way.
            _log.warning("%s: %s did not come as it was published; fetching again", uri, entry.path)
            store.download(join(uri, entry.stored_at), target)
    except (FileNotFoundError, NotADirectoryError):
        refuse_difference(uri, entry, None)
    refuse_difference(uri, entry, checksum(target))


def _leave_only(entries: Sequence[FileEntry], stage: Path) -> None:
    """Remove what one that died had fetched here, and this one did not ask for."""
    wanted = {stage / entry.path for entry in entries}
    for folder, _, names in os.walk(stage, topdown=False):
        for path in (Path(folder) / name for name in names):
            if path not in wanted:
                path.unlink()
        if Path(folder) != stage and not os.listdir(folder):
            os.rmdir(folder)
