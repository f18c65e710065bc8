"""What the stores of all schemes share: listings, downloads, errors and retried requests."""

from __future__ import annotations

import enum
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, TypeVar

import google_crc32c

from flotilla.trainer.storage.manifest import Checksum


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


class Sink:
    """The destination of a download, which counts the bytes and computes their crc32c.

    Without a file, it discards the bytes. It rejects more than `most` bytes (0: no limit).
    """

    def __init__(self, file: BinaryIO | None, count: Count, most: int = 0) -> None:
        """Store the arguments. `count` is called with the size of each block."""
        self._file, self._count, self._most = file, count, most
        self._bytes = self._crc = 0

    @property
    def checksum(self) -> Checksum:
        """The size and crc32c of the bytes so far."""
        return Checksum(self._bytes, f"{self._crc:08x}")

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""
        if self._most and self._bytes + len(data) > self._most:
            raise TooLargeError(self._most)
        self._count(len(data))
        self._crc = google_crc32c.extend(self._crc, data)
        self._bytes += len(data)
        return self._file.write(data) if self._file else len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._bytes

    def flush(self) -> None:
        """Write buffered bytes."""
        if self._file:
            self._file.flush()


class Retrying(Protocol):
    """A function that repeats a request until it succeeds or the deadline has passed."""

    def __call__(self, request: Callable[[], Result], /) -> Result:
        """Return the result of `request`."""


class TooLargeError(ValueError):
    """A file is larger than the limit for reading. The message contains the limit."""

    def __init__(self, most: int) -> None:
        """Build the message with the limit."""
        super().__init__(f"it is larger than the limit of {most >> 20} MiB")


class ChangedError(Exception):
    """A file has changed since its checksum was computed."""


class DamagedInTransitError(Exception):
    """Data was damaged between this process and the store."""


def list_pages(page: Callable[[str | None], tuple[list[Result], str | None]]) -> Iterator[Result]:
    """Yield the entries of a paged listing. `page` returns a page and the token of the next one."""
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
