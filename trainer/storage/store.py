"""The interfaces of a store of directories, and of a bucket of objects."""

from __future__ import annotations

import enum
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from flotilla.trainer.storage.manifest import Checksum, FileEntry, Manifest


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file in a listing. Listing does not read the file.

    Attributes:
        path: path relative to the listed URI, or empty if the URI is the file.
        tag: a value that changes with the content: the store's checksum, or the modification time.
    """

    path: str
    bytes: int
    tag: str


#: A function that is called with the number of bytes copied since its last call.
Count = Callable[[int], None]


def count_nothing(_bytes: int) -> None:
    """Ignore the count."""


class Store(Protocol):
    """The storage of one scheme, for one operation. All its requests share one deadline.

    Methods that need an existing file raise `FileNotFoundError` if there is none. All methods raise
    another `OSError` if the storage fails. All methods are thread-safe. `count` is called with the
    number of bytes copied.
    """

    count: Count

    def read(self, uri: str) -> bytes:
        """Return the content of one file."""

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file atomically."""

    def create(self, uri: str, data: bytes) -> bool:
        """Create one file atomically if it does not exist. Return whether it was created."""

    def checksum(self, uri: str) -> Checksum:
        """Return the size and crc32c of one file as stored."""

    def download(self, uri: str, target: Path) -> str:
        """Copy one file to a local path in an existing folder, and return its tag.

        The tag equals the tag in a listing unless the file has changed since.
        """

    def read_tagged(self, uri: str, most: int) -> tuple[bytes, str]:
        """Return the content and tag of one file. Raises `TooLargeError` beyond `most` bytes."""

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Copy the files in `manifest` from `source` to `uri`, verify them, and write the manifest.

        Returns the written manifest, which tells where the files are stored. If `uri` already has a
        manifest, readers see no change, and the result is None.
        """

    def draft(self, uri: str) -> AbstractContextManager[str]:
        """Return the location for the files of a later publication. See `publishing.draft`."""

    def add(self, draft: str, path: Path, name: str) -> FileEntry:
        """Move a local file into a draft and verify it there. Any process may call this."""

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:
        """Publish, at `uri`, the files in its draft that `manifest` lists. See `place`."""

    def children(self, uri: str) -> list[str]:
        """Return the decoded names directly below a URI, sorted, without hidden ones."""

    def files(self, uri: str) -> Iterator[ListedFile]:
        """Yield the files at and below a URI, in any order, while the listing is in progress."""

    def remove(self, uri: str) -> None:
        """Remove a file, or a directory with all its files. The manifest is removed first."""

    def discard(self, uri: str) -> None:
        """Remove one file if it exists, without a listing."""

    def sweep(self, uri: str) -> list[str]:
        """Remove orphans of dead writers in and below `uri`, and return their URIs."""

    def read_clock(self, uri: str) -> float:
        """Return the Unix time of the storage. `uri` is an existing folder or a prefix."""


Result = TypeVar("Result")
# A larger object is sent in parts of this size in bytes, so that it is never entirely in memory.
PART_BYTES = 8 << 20
# The largest page size, in entries, that all stores support.
PAGE = 1000
# Timeouts for a connection, and for the next bytes of a response, in seconds.
TIMEOUTS = (5.0, 60.0)
SUCCESS = range(200, 300)
# The metadata key that records which process wrote an object of a published directory.
WRITER = "flotilla-writer"
# The suffix of the object `KEY.TOKEN.flotilla-upload`, which marks a multipart upload in progress.
# The object records its writer, because a store does not record which process started an upload.
UPLOAD_MARK = ".flotilla-upload"
_EMPTY_PAGES = 1000


class Trouble(enum.Enum):
    """The kind of an error that a store's client raised."""

    TRANSIENT = "try again"
    ABSENT = "no such object, or no such bucket"
    NO_BUCKET = "no such bucket"
    EXISTS = "the object already exists"
    DENIED = "no permission"
    NO_CREDENTIALS = "missing or wrong credentials"
    EXPIRED = "the credentials have expired"
    NO_TLS = "the TLS connection failed"
    OTHER = "the store reported an error"
    FOREIGN = "not an error of the store"


@dataclass(frozen=True)
class Stored:
    """One object as the store describes it.

    Attributes:
        digest: the store's checksum of the content, or empty if there is none.
        created: Unix time of creation.
        writer: the value of the metadata key `WRITER`, or None if the request omits metadata.
    """

    key: str
    bytes: int
    digest: str
    created: float
    writer: str | None = field(default=None, compare=False)


class Sink(Protocol):
    """The destination of a download. `tell` returns the number of bytes received."""

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""

    def tell(self) -> int:
        """Return the number of bytes written."""

    def flush(self) -> None:
        """Write buffered bytes."""


class Retrying(Protocol):
    """A function that repeats a request until it succeeds or the deadline has passed."""

    def __call__(self, request: Callable[[], Result], /) -> Result:
        """Return the result of `request`."""


class Bucket(Protocol):
    """One bucket. Requests go through a `Retrying`. Their errors are classified by `judge`."""

    remedies: Mapping[Trouble, str]

    def get(self, key: str) -> bytes:
        """Return the content of an object."""

    def read_into(self, key: str, file: Sink) -> str:
        """Write the content of an object to an empty file, even if connections drop.

        Returns the store's checksum of the content, or an empty string if the store reports none.
        """

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""

    def create(self, key: str, data: bytes, writer: str) -> None:
        """Create and verify an object if it does not exist. Its metadata records `writer`."""

    def create_from(
        self, key: str, path: Path, expected: Checksum, writer: str, count: Count
    ) -> None:
        """Create an object from a file of any size. Raises `ChangedError` if the file changed."""

    def stat(self, key: str) -> Stored:
        """Return the description of one object, with its writer."""

    def holds(self, stored: Stored, path: Path, expected: Checksum) -> bool:
        """Return whether an object has the content of a file."""

    def read_checksum(self, key: str) -> Checksum | None:
        """Return the checksum that the store itself computed for an object, or None."""

    def walk(self, prefix: str) -> Iterator[Stored]:
        """Yield all objects whose key begins with `prefix`, ordered by key, page by page."""

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, in order."""

    def remove(self, key: str) -> None:
        """Remove an object."""

    def abort_upload(self, mark: str) -> None:
        """Abort the upload that the mark with this key belongs to (see `UPLOAD_MARK`)."""

    def judge(self, error: BaseException) -> Trouble:
        """Classify an error."""


class TooLargeError(ValueError):
    """A file is larger than the limit for reading. The message contains the limit."""

    def __init__(self, most: int) -> None:
        """Build the message with the limit."""
        super().__init__(f"it is larger than the limit of {most >> 20} MiB")


class ChangedError(Exception):
    """A file has changed since its checksum was computed."""


class DamagedInTransitError(Exception):
    """Data was damaged between this process and the store."""


def list_pages(
    page: Callable[[str | None], tuple[list[Result], str | None]],
) -> Iterator[Result]:
    """Yield the entries of a paged listing. `page` returns a page and the token of the next one.

    Raises `DamagedInTransitError` if the listing does not end.
    """
    seen, empty, token = set[str](), 0, None
    while True:
        found, token = page(token)
        yield from found
        if not token:
            return
        empty = 0 if found else empty + 1
        if token in seen or empty > _EMPTY_PAGES:
            raise DamagedInTransitError(
                "the listing of the store does not end: its pages repeat or are empty"
            )
        seen.add(token)


def tls_trouble(error: BaseException) -> Trouble:
    """Classify a client's TLS error by its causes."""
    cause: BaseException | None = error
    while cause:
        # This reason means that the endpoint uses plain HTTP.
        plain = isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER"
        if plain or isinstance(cause, ssl.SSLCertVerificationError):
            return Trouble.NO_TLS
        cause = cause.__cause__ or cause.__context__
    # Treat all other TLS errors as dropped connections.
    return Trouble.TRANSIENT
