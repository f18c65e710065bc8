"""Operations on published directories and single files, in any store."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime.errors import UserError, nearest
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage import local
from flotilla.trainer.storage.errors import (
    Conflict,
    Corrupt,
    Missing,
    NotPublished,
    UnknownSchema,
    check_form,
    report_errors,
)
from flotilla.trainer.storage.local import FileStore, NotAFileError, is_staging, staging
from flotilla.trainer.storage.manifest import (
    MANIFEST,
    Checksum,
    FileEntry,
    Manifest,
    checksum,
    compute_checksum,
)
from flotilla.trainer.storage.object_store import ObjectStore
from flotilla.trainer.storage.store import Count, Retrying, count_nothing, run_parallel
from flotilla.trainer.storage.uri import (
    SCHEMES,
    Location,
    find_endpoint,
    find_scheme,
    join,
    local_path,
    locate,
)

if TYPE_CHECKING:
    from flotilla.trainer.storage.object_store import Bucket

Store = FileStore | ObjectStore
_log = logging.getLogger(__name__)


def publish(
    directory: Path, uri: str, *, kind: str, fields: Mapping[str, Any] | None = None
) -> Manifest:
    """Verify all files below `directory`, and publish them at `uri` in one atomic step.

    Publishing the same kind, files and fields again does nothing. To detect this case, only the
    manifests are compared. Use `verify` to check the published files. Empty folders and a
    `MANIFEST.json` in `directory` are skipped, and links to files are followed. An unpublished
    directory at `uri` is replaced. Returns the manifest at `uri`. Raises `Conflict` if other
    content is already published there, or another `UserError`.
    """
    with report_errors(f"publish {directory} to {uri}"):
        manifest = Manifest(kind, _scan(directory, kind), fields or {})
        with Work(f"publishing the {kind}", "bytes", manifest.total_bytes) as work:
            store = choose_store(uri, work.add)
            if not is_published(uri) and (placed := store.place(uri, directory, manifest)):
                return placed
    return _read_same(uri, manifest)


@contextmanager
def draft(uri: str) -> Iterator[str]:
    """Yield the location of a draft of `uri`, to which any process may add files with `add_file`.

    Readers see nothing before `commit`. In a file system, the draft is a staging folder, which is
    removed at the end of the block. In an object store, it is `uri` itself, and is not removed.
    """
    with ExitStack() as opened:
        with report_errors(f"write next to {uri}"):
            where = opened.enter_context(choose_store(uri).draft(uri))
        yield where


def add_file(draft: str, path: Path, name: str) -> FileEntry:
    """Move a local file to the path `name` of a draft, and return its manifest entry."""
    with (
        report_errors(f"write {name} to {draft}"),
        Work(f"publishing {name}", "bytes", path.stat().st_size) as work,
    ):
        return choose_store(draft, work.add).add(draft, path, name)


def commit(
    draft: str, uri: str, *, kind: str, files: Iterable[FileEntry], fields: Mapping[str, Any]
) -> Manifest:
    """Publish the files that were added to the draft of `uri`. See `publish`."""
    manifest = Manifest(kind, tuple(files), fields)
    with report_errors(f"publish {uri}"):
        placed = choose_store(uri).commit(draft, uri, manifest)
    return placed or _read_same(uri, manifest)


def read_manifest(uri: str) -> Manifest:
    """Return the manifest at `uri`. Raises `NotPublished`, `Corrupt` or `UnknownSchema`."""
    try:
        data = read_bytes(join(uri, MANIFEST))
    except Missing:
        raise NotPublished(
            f"{uri} is not published (no {MANIFEST} there): check the URI, or create it again"
        ) from None
    return Manifest.from_json(data, where=f"{uri}: {MANIFEST}")


def is_published(uri: str) -> bool:
    """Return whether there is a manifest at `uri`, even an unreadable one."""
    try:
        read_manifest(uri)
    except NotPublished:
        return False
    except (Corrupt, UnknownSchema):
        return True
    return True


def verify(uri: str) -> Manifest:
    """Verify the size and crc32c of every file at `uri`. Raises `NotPublished` or `Corrupt`."""
    manifest = read_manifest(uri)
    store = choose_store(uri)

    def stored(entry: FileEntry) -> Checksum | None:
        there = _stored_checksum(store, uri, entry)
        work.add(entry.bytes)
        return there

    with (
        report_errors(f"verify {uri}"),
        Work(f"verifying the {manifest.kind}", "bytes", manifest.total_bytes) as work,
    ):
        found = run_parallel(stored, manifest.files)
    for entry, checksum_there in zip(manifest.files, found, strict=True):
        refuse_difference(uri, entry, checksum_there)
    return manifest


def _stored_checksum(store: Store, uri: str, entry: FileEntry) -> Checksum | None:
    try:
        return store.checksum(join(uri, entry.stored_at))
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_file(uri: str, path: str) -> bytes:
    """Return the verified content of a small file. Raises the errors of `verify`, or `Missing`."""
    named = {entry.path: entry for entry in read_manifest(uri).files}
    if path not in named:
        raise Missing(f"{uri} does not contain {path}{nearest(path, named)}")
    try:
        data = read_bytes(join(uri, named[path].stored_at))
    except Missing:
        refuse_difference(uri, named[path], None)
        raise
    refuse_difference(uri, named[path], compute_checksum(data))
    return data


def read_json(uri: str, path: str) -> dict[str, Any]:
    """Return the JSON object in a small published file. Raises the errors of `read_file`."""
    with check_form(f"{path} of {uri}"):
        return parse_mapping(read_file(uri, path))


def refuse_difference(uri: str, entry: FileEntry, found: Checksum | None) -> None:
    """Raise `Corrupt` unless `found` is the checksum of `entry` in the manifest at `uri`."""
    if found == entry.checksum:
        return
    if found is None:
        what = f"is missing (expected {entry.bytes} bytes)"
    elif found.bytes != entry.bytes:
        what = f"has {found.bytes} bytes (expected {entry.bytes})"
    else:
        what = f"has crc32c {found.crc32c} (expected {entry.crc32c})"
    raise Corrupt(f"{uri} is damaged: {entry.path} {what}; delete it and create it again")


def fetch(
    uri: str,
    directory: Path,
    *,
    only: Callable[[str], bool] | None = None,
    manifest: Manifest | None = None,
) -> Manifest:
    """Copy the published files at `uri`, or those that `only` selects, and verify the copies.

    Files appear only after all of them are verified, and a new directory appears atomically. Valid
    existing files are kept, including those of an interrupted fetch. Returns the whole manifest.
    Raises `NotPublished`, `Corrupt`, or `UserError` if `directory` cannot be written.
    """
    manifest = manifest or read_manifest(uri)
    directory = Path(os.path.abspath(directory))
    wanted = [entry for entry in manifest.files if only is None or only(entry.path)]
    with report_errors(f"fetch {uri} into {directory}"):
        lacking = [entry for entry in wanted if not _is_valid(directory, entry)]
        if lacking or not directory.is_dir():
            total = sum(entry.bytes for entry in lacking)
            with Work(f"fetching the {manifest.kind}", "bytes", total) as work:
                _fetch_files(choose_store(uri, work.add), uri, lacking, directory)
    return manifest


def _is_valid(directory: Path, entry: FileEntry) -> bool:
    path = directory / entry.path
    return path.is_file() and checksum(path) == entry.checksum


def _fetch_files(store: Store, uri: str, entries: Sequence[FileEntry], directory: Path) -> None:
    # Stage inside the directory if it exists, because it may be a mount, and a rename cannot cross
    # file systems.
    home = directory if directory.is_dir() else directory.parent
    with staging(home, directory.name, resume=True) as stage:
        run_parallel(lambda entry: _download(store, uri, entry, stage), entries)
        _remove_others(entries, stage)
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
    if _is_valid(stage, entry):
        store.count(entry.bytes)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.download(join(uri, entry.stored_at), target)
        if checksum(target) != entry.checksum:
            # The file may have been damaged in transit, so try once more.
            _log.warning("%s: %s was damaged in transit; downloading it again", uri, entry.path)
            store.download(join(uri, entry.stored_at), target)
    except (FileNotFoundError, NotADirectoryError):
        refuse_difference(uri, entry, None)
    refuse_difference(uri, entry, checksum(target))


def _remove_others(entries: Sequence[FileEntry], stage: Path) -> None:
    wanted = {stage / entry.path for entry in entries}
    for folder, _, names in os.walk(stage, topdown=False):
        for path in (Path(folder) / name for name in names):
            if path not in wanted:
                path.unlink()
        if Path(folder) != stage and not os.listdir(folder):
            os.rmdir(folder)


def list_published(uri: str, kind: str | None = None) -> list[tuple[str, Manifest]]:
    """Return the readable published directories directly below `uri`, ordered by name."""
    found = [join(uri, name) for name in names(uri)]
    manifests = zip(found, run_parallel(_readable, found), strict=True)
    return [(child, m) for child, m in manifests if m is not None and kind in (None, m.kind)]


def newest(uri: str, kind: str | None = None) -> tuple[str, Manifest] | None:
    """Return the newest published directory (of `kind`, if given) directly below `uri`, or None."""
    return max(list_published(uri, kind), key=lambda found: found[1].created, default=None)


def _readable(uri: str) -> Manifest | None:
    try:
        return read_manifest(uri)
    except NotPublished:
        return None
    except (Corrupt, UnknownSchema) as error:
        _log.warning("skipped: %s", error)
        return None


def collect_garbage(uri: str) -> list[str]:
    """Remove files that dead writers left in and below `uri`, and return their URIs.

    In a file system, these are the staging folders of processes that have ended. For object stores,
    see `object_store.collect`.
    """
    with report_errors(f"collect garbage below {uri}"):
        return choose_store(uri).sweep(uri)


def read_clock(uri: str) -> float:
    """Return the Unix time of the storage, or raise `Missing` if the folder `uri` does not exist.

    The time may differ from the clock of this machine.
    """
    with report_errors(f"read the clock of {uri}"):
        try:
            return choose_store(uri).read_clock(uri)
        except FileNotFoundError:
            raise Missing(f"there is nothing at {uri}") from None


def delete(uri: str) -> None:
    """Remove the file or directory at `uri`, if any. A directory is unpublished first."""
    with report_errors(f"delete {uri}"), suppress(FileNotFoundError):
        choose_store(uri).remove(uri)


def read_bytes(uri: str) -> bytes:
    """Return the content of a file. Raises `Missing`, or `Corrupt` if `uri` is not a file."""
    with report_errors(f"read {uri}"):
        try:
            return choose_store(uri).read(uri)
        except (FileNotFoundError, NotADirectoryError):
            raise Missing(f"there is nothing at {uri}") from None
        except NotAFileError as error:
            with report_errors(f"read {uri}", Corrupt):
                raise error from None


def read_tagged(uri: str, most: int) -> tuple[bytes, str]:
    """Return the content and tag of a file of at most `most` bytes. Raises the store's errors."""
    return choose_store(uri).read_tagged(uri, most)


def write_bytes(uri: str, data: bytes) -> None:
    """Create or replace the file at `uri` atomically."""
    with report_errors(f"write {uri}"):
        choose_store(uri).write(uri, data)


def append_line(uri: str, line: bytes) -> None:
    """Append a line to the file at `uri`, which must be in a file system. See `storage.local`."""
    path = local_path(uri)
    if path is None:
        raise ValueError(f"cannot append to {uri}, because it is not in a file system")
    with report_errors(f"write {uri}"):
        local.append_line(path, line)


def create_bytes(uri: str, data: bytes) -> bool:
    """Create the file at `uri` if it does not exist. Return whether it was created.

    In some stores, each of several concurrent writers may be told that it created the file. To find
    out whose content was stored, read the file again.
    """
    with report_errors(f"create {uri}"):
        return choose_store(uri).create(uri, data)


def names(uri: str) -> list[str]:
    """Return the decoded names directly below `uri`, sorted. Empty if nothing exists there."""
    with report_errors(f"list {uri}"):
        try:
            return choose_store(uri).children(uri)
        except FileNotFoundError:
            return []


def _scan(directory: Path, kind: str) -> tuple[FileEntry, ...]:
    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(directory, onerror=fail):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise UserError(f"cannot publish {Path(folder) / name}: it is a link to a folder")
        # Skip the staging folder of an interrupted `fetch`, which is not part of the content.
        folders[:] = [name for name in folders if not is_staging(name)]
        paths = (Path(folder) / name for name in names)
        found += [path for path in paths if path != directory / MANIFEST]
    entries = []
    with Work(f"checking the {kind}", "bytes") as work:
        for path in found:
            entries.append(_entry(directory, path))
            work.add(entries[-1].bytes)
    return tuple(entries)


def _entry(directory: Path, path: Path) -> FileEntry:
    name = path.relative_to(directory).as_posix()
    if path.exists() and not path.is_file():
        raise UserError(f"cannot publish {path}: it is neither a file nor a folder")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UserError(f"cannot publish {name!r}: its name is not UTF-8") from None
    found = checksum(path)
    return FileEntry(name, found.bytes, found.crc32c)


def _read_same(uri: str, new: Manifest) -> Manifest:
    """Return the manifest at `uri`. Raises `Conflict` if its content differs from that of `new`."""
    there = read_manifest(uri)
    if there.same_content(new):
        return there
    raise Conflict(
        f"{uri} is already published with different content ({_difference(there, new)}): delete it "
        "first, or publish elsewhere"
    )


def _difference(there: Manifest, new: Manifest) -> str:
    if there.kind != new.kind:
        return f"kind {there.kind} instead of {new.kind}"
    different = sorted({entry.path for entry in set(there.files) ^ set(new.files)})
    if different:
        return f"{different[0]} differs" + (
            f", and so do {n} more files" if (n := len(different) - 1) else ""
        )
    names = sorted(there.fields.keys() | new.fields.keys())
    fields = [name for name in names if there.fields.get(name) != new.fields.get(name)]
    return f"different fields: {', '.join(fields)}"


def choose_store(uri: str, count: Count = count_nothing) -> Store:
    """Return the store for `uri`, for one operation, whose requests share one deadline.

    The methods of all stores are thread-safe. Those that need an existing file raise
    `FileNotFoundError` if there is none, and another `OSError` if the storage fails. `count` is
    called with the number of bytes copied since the last call. Raises `UserError`.
    """
    if find_scheme(uri) == "file":
        return FileStore(count)
    location = locate(uri)
    return ObjectStore(location.home, partial(_bucket, location), count)


def _bucket(location: Location, retry: Retrying) -> Bucket:
    if SCHEMES[location.scheme] == "gcs":
        from flotilla.trainer.storage.gcs import GcsBucket

        return GcsBucket(location.bucket, retry)
    try:
        from flotilla.trainer.storage.s3 import S3Bucket
    except ModuleNotFoundError as error:
        raise UserError(
            f"{location.scheme}:// needs {error.name}: run pip install 'kfp-flotilla[s3]'"
        ) from None
    return S3Bucket(location.bucket, find_endpoint(location), retry)
