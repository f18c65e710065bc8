"""The interfaces of a store of directories, and of a bucket of objects with one protocol."""

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
    """One file as a listing shows it, without being read.

    Attributes:
        path: below the URI that was listed; empty where that is the file itself.
        tag: what differs when the content does: a checksum of the store, or the time of a change.
    """

    path: str
    bytes: int
    tag: str


#: Called with the bytes of files that were copied since the last call.
Count = Callable[[int], None]


def count_nothing(_bytes: int) -> None:
    """Count nothing."""


class Store(Protocol):
    """The storage of one scheme, for one operation, whose requests share one deadline.

    Every method raises `FileNotFoundError` where there is nothing at the URI, and another `OSError`
    where the storage fails. All methods are thread-safe. `count` counts what is copied.
    """

    count: Count

    def read(self, uri: str) -> bytes:
        """Return the content of one file."""

    def write(self, uri: str, data: bytes) -> None:
        """Create or replace one file, atomically."""

    def create(self, uri: str, data: bytes) -> bool:
        """Create one file atomically if there is none; return whether it was created."""

    def checksum(self, uri: str) -> Checksum:
        """Return size and crc32c of one file as it is stored now."""

    def download(self, uri: str, target: Path) -> str:
        """Copy one file to a local path in a folder that exists; return its tag, as it was read.

        The tag is that of a listing, or another one where the file has changed meanwhile.
        """

    def read_tagged(self, uri: str, most: int) -> tuple[bytes, str]:
        """Return content and tag of one file; raises `TooLargeError` beyond `most` bytes."""

    def place(self, uri: str, source: Path, manifest: Manifest) -> Manifest | None:
        """Copy the files of `source` that `manifest` names to `uri`, verified, the manifest last.

        Returns the manifest as it was written, with the paths at which the files are stored, or
        None where there is one at `uri` already; then nothing changes that a reader sees.
        """

    def draft(self, uri: str) -> AbstractContextManager[str]:
        """Return where files are added to what is published at a URI later; see `drafts`."""

    def add(self, draft: str, path: Path, name: str) -> FileEntry:
        """Move a local file into a draft, verified at its destination; any process may."""

    def commit(self, draft: str, uri: str, manifest: Manifest) -> Manifest | None:
        """Publish at `uri` what was added to its draft and `manifest` names; see `place`."""

    def children(self, uri: str) -> list[str]:
        """Return the plain names directly below a URI, in order; hidden ones left out."""

    def files(self, uri: str) -> Iterator[ListedFile]:
        """Yield the files at a URI and below, while they are listed; in any order."""

    def remove(self, uri: str) -> None:
        """Remove a file, or a directory with all below it, the manifest first."""

    def discard(self, uri: str) -> None:
        """Remove one file, if it exists, without listing anything."""

    def sweep(self, uri: str) -> list[str]:
        """Remove the orphans of dead writers at `uri` and below; return their URIs."""


Result = TypeVar("Result")
# A larger object is sent in parts of this size, so that it is never in memory as a whole.
PART_BYTES = 8 << 20
# The most that all stores return at once.
PAGE = 1000
# Seconds to connect, and seconds until the next bytes come.
TIMEOUTS = (5.0, 60.0)
SUCCESS = range(200, 300)
# The metadata key of the process that wrote an object of a published directory.
WRITER = "flotilla-writer"
# How the key of an object ends that says which upload in parts is going on: `KEY.TOKEN` and this. A
# store does not say who has begun an upload.
UPLOAD_MARK = ".flotilla-upload"
# So many pages in a row of a listing may be empty.
_EMPTY_PAGES = 1000


class Trouble(enum.Enum):
    """The class of a client's error."""

    TRANSIENT = "try again"
    ABSENT = "no such object, or no such bucket"
    NO_BUCKET = "no such bucket"
    EXISTS = "there is an object already"
    DENIED = "no permission"
    NO_CREDENTIALS = "no credentials, or wrong ones"
    EXPIRED = "credentials that have expired"
    NO_TLS = "no TLS connection"
    OTHER = "another error of the store"
    FOREIGN = "no error of the store"


@dataclass(frozen=True)
class Stored:
    """One object, as the store describes it.

    Attributes:
        digest: the store's own checksum of its content; empty without one.
        created: when, in seconds since 1970.
        writer: its metadata `WRITER`; None where the request does not return metadata.
    """

    key: str
    bytes: int
    digest: str
    created: float
    writer: str | None = field(default=None, compare=False)


class Sink(Protocol):
    """What an object is written to; `tell` returns how many bytes have come."""

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""

    def tell(self) -> int:
        """Return how many bytes were written."""

    def flush(self) -> None:
        """Write what is buffered."""


class Retrying(Protocol):
    """Repeats a request until it succeeds, or the deadline has passed."""

    def __call__(self, request: Callable[[], Result], /) -> Result:
        """Return the result of `request`."""


class Bucket(Protocol):
    """One bucket. Requests go through a `Retrying`; errors are the client's own, see `judge`."""

    remedies: Mapping[Trouble, str]

    def get(self, key: str) -> bytes:
        """Return the content of an object."""

    def read_into(self, key: str, file: Sink) -> str:
        """Write the content of an object to an empty file, also when connections drop.

        Returns the store's checksum of what was read, or an empty text where it says none.
        """

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""

    def create(self, key: str, data: bytes, writer: str) -> None:
        """Create an object where there is none, verified; `writer` goes into its metadata."""

    def create_from(
        self, key: str, path: Path, expected: Checksum, writer: str, count: Count
    ) -> None:
        """Create an object from a file of any size; raises `ChangedError` if that has changed."""

    def stat(self, key: str) -> Stored:
        """Return the description of one object, with its writer."""

    def holds(self, stored: Stored, path: Path, expected: Checksum) -> bool:
        """Say whether an object has the content of a file."""

    def vouched(self, key: str) -> Checksum | None:
        """Return the checksum that the store itself computed for an object, if it computes one."""

    def walk(self, prefix: str) -> Iterator[Stored]:
        """Yield all objects whose key begins with `prefix`, by key, while they are listed."""

    def names(self, prefix: str) -> list[str]:
        """Return the names up to the next slash after `prefix`, in order."""

    def remove(self, key: str) -> None:
        """Remove an object."""

    def abort_upload(self, mark: str) -> None:
        """Abort the upload of which a mark, see `UPLOAD_MARK`, has the key."""

    def judge(self, error: BaseException) -> Trouble:
        """Classify an error."""


class TooLargeError(ValueError):
    """A file has more bytes than are read of one; the message says so."""

    def __init__(self, most: int) -> None:
        """Say how many are read."""
        super().__init__(f"it has more than {most >> 20} MiB, which are read at most")


class ChangedError(Exception):
    """A file has changed since its checksum was computed."""


class DamagedInTransitError(Exception):
    """Content or an answer was damaged between this process and the store."""


def list_pages(
    page: Callable[[str | None], tuple[list[Result], str | None]],
) -> Iterator[Result]:
    """Yield what is on the pages of a listing; `page` returns one, and the token of the next.

    Raises `DamagedInTransitError` where the listing has no end.
    """
    seen, empty, token = set[str](), 0, None
    while True:
        found, token = page(token)
        yield from found
        if not token:
            return
        empty = 0 if found else empty + 1
        if token in seen or empty > _EMPTY_PAGES:
            raise DamagedInTransitError("the listing of the store has no end: it repeats itself")
        seen.add(token)


def tls_trouble(error: BaseException) -> Trouble:
    """Return the class of a client's error of TLS, by its causes."""
    cause: BaseException | None = error
    while cause:
        # The endpoint speaks plain HTTP. Other errors come of connections that were cut.
        plain = isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER"
        if plain or isinstance(cause, ssl.SSLCertVerificationError):
            return Trouble.NO_TLS
        cause = cause.__cause__ or cause.__context__
    return Trouble.TRANSIENT
