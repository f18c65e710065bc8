"""Storage in object stores, where creating the manifest publishes a directory.

An object that a manifest may list is never overwritten: if one exists at a file's path, the file
is stored next to it. Therefore every manifest stays valid, and the first manifest wins.

An orphan is an uploaded object that no manifest lists or will list: its directory is published,
its writer (recorded in its metadata) has ended, or it is older than `ORPHAN_SECONDS`.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.errors import StoreError
from flotilla.trainer.storage.local import is_gone, writer
from flotilla.trainer.storage.manifest import (
    MANIFEST,
    Checksum,
    FileEntry,
    Manifest,
    checksum,
    compute_checksum,
)
from flotilla.trainer.storage.store import (
    PART_BYTES,
    UPLOAD_MARK,
    ChangedError,
    Count,
    ListedFile,
    Retry,
    Retrying,
    Sink,
    Stored,
    Trouble,
    count_nothing,
    describe,
    run_parallel,
)
from flotilla.trainer.storage.uri import join, locate

if TYPE_CHECKING:
    from flotilla.trainer.storage.gcs import GcsBucket
    from flotilla.trainer.storage.s3 import S3Bucket

    Bucket: TypeAlias = GcsBucket | S3Bucket

# Age of an object, in seconds, after which its writer is assumed to be dead.
ORPHAN_SECONDS = 24 * 3600.0
# Number of other paths to try if the path of a file has an object with other content.
_ATTEMPTS = 3
# Suffixes of the empty objects that tools create to mark a folder.
_FOLDER_MARKS = ("/", "_$folder$")

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


def collect(bucket: Bucket, prefix: str) -> list[str]:
    """Remove the orphans below `prefix`, and return their keys."""
    before = time.time() - ORPHAN_SECONDS
    found = list(bucket.walk(prefix))
    directories, named = _published_files(bucket, found)
    unnamed = [each for each in found if each.key not in named and not _is_manifest(each)]

    def is_over(stored: Stored) -> bool:
        writer = stored.writer if stored.writer is not None else bucket.stat(stored.key).writer
        inside = any(stored.key.startswith(directory) for directory in directories)
        # Keep an upload in progress, because its writer removes it if another writer publishes
        # first.
        inside = inside and not stored.key.endswith(UPLOAD_MARK)
        return bool(writer) and (inside or stored.created < before or is_gone(writer or ""))

    over = run_parallel(is_over, unnamed)
    # Read the manifests again, because a writer may have published just before it ended.
    _, named = _published_files(bucket, bucket.walk(prefix))
    dead = [
        each.key for each, so in zip(unnamed, over, strict=True) if so and each.key not in named
    ]
    run_parallel(bucket.abort_upload, [key for key in dead if key.endswith(UPLOAD_MARK)])
    run_parallel(bucket.remove, dead)
    return sorted(dead)


def _published_files(bucket: Bucket, found: Iterable[Stored]) -> tuple[list[str], set[str]]:
    manifests = [each.key for each in found if _is_manifest(each)]
    named: set[str] = set()
    directories = []

    def files_of(key: str) -> tuple[FileEntry, ...] | None:
        try:
            return Manifest.from_json(bucket.get(key), where=key).files
        except UserError as error:
            _log.warning("skipped: %s", error)
        except Exception as error:
            if bucket.judge(error) in (Trouble.TRANSIENT, Trouble.FOREIGN):
                raise
            _log.warning("skipped: %s: %s", key, describe(error))
        return None

    for key, files in zip(manifests, run_parallel(files_of, manifests), strict=True):
        directory = key.removesuffix(MANIFEST)
        if files is None:
            # The manifest is unreadable, so treat all objects of the directory as listed.
            named.update(each.key for each in found if each.key.startswith(directory))
            continue
        directories.append(directory)
        named.update(directory + entry.stored_at for entry in files)
    return directories, named


def _is_manifest(stored: Stored) -> bool:
    return stored.key.rpartition("/")[2] == MANIFEST


class ObjectStore:
    """One bucket, used for one operation."""

    def __init__(
        self, home: str, opened: Callable[[Retrying], Bucket], count: Count = count_nothing
    ) -> None:
        """Open the bucket of the URI `home`, without sending a request."""
        self.count = count
        self._home = home
        self._retry = Retry()
        self._bucket = opened(self._call)
        self._answered = False

    def read(self, uri: str) -> bytes:
        """Return the content of one object."""
        with self._translate(uri):
            return self._bucket.get(_key(uri))

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one object."""
        with self._translate(uri, writes=True):
            self._bucket.put(_key(uri), data)

    def create(self, uri: str, data: bytes) -> bool:
        """Create one object if it is missing. Return whether it was created."""
        # Check for an existing object first, because some stores have no conditional writes.
        return self._stat(uri) is None and self._create(uri, data)

    def checksum(self, uri: str) -> Checksum:
        """Return the checksum that the store computed, or read the object to compute it."""
        with self._translate(uri):
            if known := self._bucket.read_checksum(_key(uri)):
                return known
            sink = Sink(None, self._retry.progress)
            self._bucket.read_into(_key(uri), sink)
            return sink.checksum

    def download(self, uri: str, target: Path) -> str:
        """Copy one object to a local path, and return its tag."""
        with target.open("wb") as file:
            return self._read_object(uri, Sink(file, self._counted))

    def read_tagged(self, uri: str, most: int) -> tuple[bytes, str]:
        """Return the content and tag of one object. Raises `TooLargeError` beyond `most` bytes."""
        file = io.BytesIO()
        tag = self._read_object(uri, Sink(file, self._counted, most))
        return file.getvalue(), tag

    def _counted(self, count: int) -> None:
        self.count(count)
        self._retry.progress(count)

    def _read_object(self, uri: str, sink: Sink) -> str:
        with self._translate(uri):
            return self._bucket.read_into(_key(uri), sink) or sink.checksum.crc32c

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Upload the files in parallel, then create the manifest and delete unlisted objects.

        Returns the manifest, which tells where the files are stored, or None if `uri` has another.
        """
        there = self._below(uri)
        if MANIFEST in there:
            return None
        inside = next((path for path in there if path.endswith(f"/{MANIFEST}")), None)
        if inside:
            below = join(uri, inside.removesuffix(f"/{MANIFEST}"))
            raise UserError(
                f"cannot publish to {uri}: {below}, which is below it, is already published; use "
                "another location"
            )
        created: list[str] = []

        def place_file(entry: FileEntry) -> FileEntry:
            path = source / entry.path
            return self._place_file(uri, path, entry, there.get(entry.path), created)

        files = tuple(run_parallel(place_file, manifest.files))
        return self._publish(uri, replace(manifest, files=files), {*there, *created})

    @contextmanager
    def draft(self, uri: str) -> Iterator[str]:
        """Yield the destination itself, which readers ignore until the manifest exists."""
        yield uri

    def add(self, draft: str, path: Path, name: str) -> FileEntry:
        """Upload the file, then delete it locally."""
        found = checksum(path)
        entry = FileEntry(name, found.bytes, found.crc32c)
        # Check for an existing object first, because a store without conditional writes would
        # overwrite it.
        placed = self._place_file(draft, path, entry, self._stat(join(draft, name)), [])
        path.unlink()
        return placed

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:
        """Create the manifest if all its objects are visible, and delete all other objects."""
        there = self._below(draft)
        if MANIFEST in there:
            return None
        for entry in manifest.files:
            stored = there.get(entry.stored_at)
            if stored is None or stored.bytes != entry.bytes:
                raise StoreError(
                    f"{join(uri, entry.stored_at)} is missing or differs from the uploaded file; "
                    "try again"
                )
        return self._publish(uri, manifest, set(there))

    def _publish(self, uri: str, manifest: Manifest, there: set[str]) -> Manifest | None:
        last = join(uri, MANIFEST)
        won = self.create(last, manifest.to_json())
        winner = manifest if won else Manifest.from_json(self.read(last), where=last)
        named = {entry.stored_at for entry in winner.files}
        self._remove_unnamed(uri, there - named - {MANIFEST})
        return manifest if won else None

    def children(self, uri: str) -> list[str]:
        """Return the decoded names directly below a URI, sorted, without hidden ones."""
        with self._translate(uri):
            names = self._bucket.names(_prefix(uri))
        return [name for name in names if name and not name.startswith(".")]

    def files(self, uri: str) -> Iterator[ListedFile]:
        """Yield the objects below a URI, or the object at the URI, without folder markers."""
        prefix = _prefix(uri)
        with self._translate(uri):
            below = False
            for each in self._bucket.walk(prefix):
                below = True
                if not each.key.endswith(_FOLDER_MARKS):
                    yield ListedFile(each.key.removeprefix(prefix), each.bytes, _tag(each))
            if not below and prefix:
                each = self._bucket.stat(_key(uri))
                yield ListedFile("", each.bytes, _tag(each))

    def read_clock(self, uri: str) -> float:
        """Create a temporary object, and return its creation time according to the store."""
        key = _key(join(uri, f"clock-{uuid.uuid4().hex}"))
        with self._translate(uri, writes=True):
            self._bucket.put(key, b"")
            try:
                return self._bucket.stat(key).created
            finally:
                self._bucket.remove(key)

    def remove(self, uri: str) -> None:
        """Remove the manifests first, then the other objects in parallel."""
        below = self._below(uri)
        manifests = [path for path in below if path.rpartition("/")[2] == MANIFEST]
        itself = self._stat(uri)
        if not below and not itself:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
        if itself:
            self.discard(uri)
        for paths in (manifests, sorted(below.keys() - set(manifests))):
            run_parallel(lambda path: self.discard(join(uri, path)), paths)

    def discard(self, uri: str) -> None:
        """Remove one object. This does not need the permission to list objects."""
        with suppress(FileNotFoundError), self._translate(uri):
            self._bucket.remove(_key(uri))

    def sweep(self, uri: str) -> list[str]:
        """Remove orphans. See `collect`."""
        with self._translate(uri):
            keys = collect(self._bucket, _prefix(uri))
        return [join(uri, key.removeprefix(_prefix(uri))) for key in keys]

    def _place_file(
        self, uri: str, path: Path, entry: FileEntry, there: Stored | None, created: list[str]
    ) -> FileEntry:
        others = (f"{entry.path}.{uuid.uuid4().hex[:12]}" for _ in range(_ATTEMPTS))
        for at in (entry.path, *others):
            where = join(uri, at)
            if there is None and self._upload(where, path, entry):
                created.append(at)
                return replace(entry, at="" if at == entry.path else at)
            with self._translate(where):
                found = there or self._bucket.stat(_key(where))
                if self._bucket.holds(found, path, entry.checksum):
                    return replace(entry, at="" if at == entry.path else at)
            there = None
        raise StoreError(
            f"the content stored at {join(uri, entry.path)} differs from the content sent; try "
            "again"
        )

    def _upload(self, uri: str, path: Path, entry: FileEntry) -> bool:
        try:
            if entry.bytes > PART_BYTES:
                with self._translate(uri, writes=True):
                    self._bucket.create_from(_key(uri), path, entry.checksum, writer(), self.count)
                return True
            data = path.read_bytes()
            if compute_checksum(data) != entry.checksum:
                raise ChangedError
        except ChangedError:
            raise UserError(
                f"cannot publish {path} to {uri}: the file changed during the copy, or the copy is "
                "damaged; try again when nothing else writes there"
            ) from None
        except FileExistsError:
            return False
        is_created = self._create(uri, data)
        self.count(entry.bytes)
        return is_created

    def _stat(self, uri: str) -> Stored | None:
        try:
            with self._translate(uri):
                return self._bucket.stat(_key(uri))
        except FileNotFoundError:
            return None

    def _create(self, uri: str, data: bytes) -> bool:
        try:
            with self._translate(uri, writes=True):
                self._bucket.create(_key(uri), data, writer())
        except FileExistsError:
            return False
        return True

    def _remove_unnamed(self, uri: str, paths: Iterable[str]) -> None:
        try:
            run_parallel(lambda path: self.discard(join(uri, path)), sorted(paths))
        except OSError as error:
            # Only log the error, because the published directory is complete without the deletion.
            _log.warning(
                "cannot delete some objects below %s (%s); delete them with `flotilla gc`",
                uri,
                error,
            )

    def _below(self, uri: str) -> dict[str, Stored]:
        prefix = _prefix(uri)
        with self._translate(uri):
            return {each.key.removeprefix(prefix): each for each in self._bucket.walk(prefix)}

    def _call(self, request: Callable[[], Result]) -> Result:
        result = self._retry.call(
            self._home,
            lambda: self._retry.within_deadline(request),
            lambda error: self._bucket.judge(error) is Trouble.TRANSIENT,
        )
        self._answered = True
        return result

    @contextmanager
    def _translate(self, uri: str, *, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            trouble = self._bucket.judge(error)
            if writes and trouble is Trouble.ABSENT:
                # A write never fails because the object is missing, so the bucket must be missing.
                trouble = Trouble.NO_BUCKET
            if trouble is Trouble.FOREIGN:
                raise
            raise self._store_error(uri, trouble, error) from error

    def _store_error(self, uri: str, trouble: Trouble, error: Exception) -> OSError:
        if trouble is Trouble.ABSENT:
            # Google returns the same error for a missing object and a missing bucket.
            trouble = self._find_missing()
        if trouble is Trouble.ABSENT:
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri)
        if trouble is Trouble.EXISTS:
            return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), uri)
        refusal = StoreError(self._message(uri, trouble, error))
        refusal.trouble = trouble.name
        return refusal

    def _message(self, uri: str, trouble: Trouble, error: Exception) -> str:
        if trouble is Trouble.NO_BUCKET:
            remedy = "create it, or use another bucket"
            return f"there is no bucket {self._home}; {remedy}"
        remedy = self._bucket.remedies.get(trouble, "")
        where = self._home if trouble is Trouble.NO_CREDENTIALS else uri
        reason = f"{where}: {trouble.value} ({describe(error)})"
        return f"{reason}; {remedy}" if remedy else reason

    def _find_missing(self) -> Trouble:
        if self._answered:
            return Trouble.ABSENT
        try:
            self._bucket.names("MANIFEST of nothing/")
        except Exception as error:
            absent = self._bucket.judge(error) in (Trouble.ABSENT, Trouble.NO_BUCKET)
            return Trouble.NO_BUCKET if absent else Trouble.ABSENT
        return Trouble.ABSENT


def _tag(stored: Stored) -> str:
    # The store hides the checksum of an object that is encrypted with a customer-supplied key. Use
    # the time of creation instead.
    return stored.digest or f"{stored.created:.6f}"


def _key(uri: str) -> str:
    return locate(uri).key


def _prefix(uri: str) -> str:
    key = _key(uri)
    return f"{key}/" if key else ""
